// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | tpu-mlir-opt | filecheck %s

// CHECK: func.func @main
func.func @main(%x: tensor<2x3x4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<2x3x4x!quant.uniform<i8:f32, 0.25:5>> {
  // CHECK: quant.softmax {{.*}} {table = "t", mult = 32640 : i64, shift = 7 : i64, zp = -128 : i64, lo = -128 : i64, hi = 127 : i64, name = "s"}
  %s = quant.softmax %x {table = "t", mult = 32640 : i64, shift = 7 : i64, zp = -128 : i64, lo = -128 : i64, hi = 127 : i64, name = "s"} : (tensor<2x3x4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<2x3x4x!quant.uniform<i8:f32, 0.00392156862745098:-128>>
  %g = top.weight {name = "g"} : tensor<12xi16>
  %b = top.weight {name = "b"} : tensor<12xi32>
  // CHECK: quant.layer_norm {{.*}} {axis = 1 : i64, epsilon = 41 : i64, shift = 23 : i64, zp = 5 : i64, lo = -128 : i64, hi = 127 : i64, name = "n"}
  %n = quant.layer_norm %s, %g, %b {axis = 1 : i64, epsilon = 41 : i64, shift = 23 : i64, zp = 5 : i64, lo = -128 : i64, hi = 127 : i64, name = "n"} : (tensor<2x3x4x!quant.uniform<i8:f32, 0.00392156862745098:-128>>, tensor<12xi16>, tensor<12xi32>) -> tensor<2x3x4x!quant.uniform<i8:f32, 0.25:5>>
  func.return %n : tensor<2x3x4x!quant.uniform<i8:f32, 0.25:5>>
}
