// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | tpu-mlir-opt | filecheck %s

// CHECK: func.func @main
func.func @main(%x: tensor<1x4x4x2xf32>) -> tensor<1x2x2x3xf32> {
  // CHECK: quant.quantize {{.*}} -> tensor<1x4x4x2x!quant.uniform<i8:f32, 1.0e-05:0>>
  %q = quant.quantize %x {name = "x/quantize"} : (tensor<1x4x4x2xf32>) -> tensor<1x4x4x2x!quant.uniform<i8:f32, 1.0e-05:0>>
  %w = top.weight {name = "w"} : tensor<3x2x3x3xi8>
  %b = top.weight {name = "b"} : tensor<3xi32>
  %m = top.weight {name = "m"} : tensor<3xi32>
  %s = top.weight {name = "s"} : tensor<3xi8>
  // CHECK: quant.conv {{.*}} {strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, group = 1 : i64, layout = "nhwc", zp = 7 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_even", name = "c"}
  %c = quant.conv %q, %w, %b, %m, %s {strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, group = 1 : i64, layout = "nhwc", zp = 7 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_even", name = "c"} : (tensor<1x4x4x2x!quant.uniform<i8:f32, 1.0e-05:0>>, tensor<3x2x3x3xi8>, tensor<3xi32>, tensor<3xi32>, tensor<3xi8>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 0.02519685039370079:7>>
  // CHECK: quant.lut {{.*}} {table = "c.table", function = "hard_swish", name = "l"}
  %l = quant.lut %c {table = "c.table", function = "hard_swish", name = "l"} : (tensor<1x2x2x3x!quant.uniform<i8:f32, 0.02519685039370079:7>>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>
  // CHECK: quant.add {{.*}}mult_a = 5 : i64, mult_b = 6 : i64, shift = 3 : i64, bias = 257 : i64, bias_shift = 2 : i64, zp = -128 : i64
  %a = quant.add %l, %l {mult_a = 5 : i64, mult_b = 6 : i64, shift = 3 : i64, bias = 257 : i64, bias_shift = 2 : i64, zp = -128 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "truncate", name = "a"} : (tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>, tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 1.0:0>>
  // CHECK: quant.dequantize
  %y = quant.dequantize %a {name = "y/dequantize"} : (tensor<1x2x2x3x!quant.uniform<i8:f32, 1.0:0>>) -> tensor<1x2x2x3xf32>
  func.return %y : tensor<1x2x2x3xf32>
}
