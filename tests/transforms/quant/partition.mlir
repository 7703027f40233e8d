// RUN: tpu-mlir-opt %s -p quant-partition | filecheck %s
// RUN: tpu-mlir-opt %s -p quant-partition,quant-partition | filecheck %s

// Two branches, each host - device - host - device: the switches are shared, not doubled.

// CHECK: quant.quantize %{{.*}} {name = "a/quantize", device = "host", segment = 0 : i32}
// CHECK: quant.quantize %{{.*}} {name = "b/quantize", device = "host", segment = 0 : i32}
// CHECK: quant.lut %{{.*}} {{{.*}}name = "la", device = "tpu", segment = 1 : i32}
// CHECK: quant.lut %{{.*}} {{{.*}}name = "lb", device = "tpu", segment = 1 : i32}
// CHECK: quant.dequantize %{{.*}} {name = "la/dequantize", device = "host", segment = 2 : i32}
// CHECK: top.softmax %{{.*}} {{{.*}}host = "softmax needs exponentials and a division", device = "host", segment = 2 : i32}
// CHECK: quant.quantize %{{.*}} {name = "s/quantize", device = "host", segment = 2 : i32}
// CHECK: quant.dequantize %{{.*}} {name = "lb/dequantize", device = "host", segment = 2 : i32}
// CHECK: top.reshape %{{.*}} {name = "r", device = "tpu", segment = 3 : i32}
// CHECK: quant.dequantize %{{.*}} {name = "r/dequantize", device = "host", segment = 4 : i32}
func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<2x2xf32>, tensor<4xf32>) {
  %0 = quant.quantize %a {name = "a/quantize"} : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  %1 = quant.lut %0 {table = "t", function = "relu", name = "la"} : (tensor<4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  %2 = quant.dequantize %1 {name = "la/dequantize"} : (tensor<4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<4xf32>
  %3 = top.softmax %2 {axis = 0 : i64, name = "s", host = "softmax needs exponentials and a division"} : (tensor<4xf32>) -> tensor<4xf32>
  %4 = quant.quantize %3 {name = "s/quantize"} : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  %5 = top.reshape %4 {name = "r"} : (tensor<4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<2x2x!quant.uniform<i8:f32, 0.5:0>>
  %6 = quant.dequantize %5 {name = "r/dequantize"} : (tensor<2x2x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<2x2xf32>
  %7 = quant.quantize %b {name = "b/quantize"} : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  %8 = quant.lut %7 {table = "t", function = "relu", name = "lb"} : (tensor<4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  %9 = quant.dequantize %8 {name = "lb/dequantize"} : (tensor<4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<4xf32>
  func.return %6, %9 : tensor<2x2xf32>, tensor<4xf32>
}
