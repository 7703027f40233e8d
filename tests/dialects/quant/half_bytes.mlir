// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | tpu-mlir-opt | filecheck %s

// Weights of 4 bits: two a byte (i4), or a byte each on a chip that has no int4.
// CHECK: func.func @main
func.func @main(%q: tensor<1x4x4x2x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>> {
  // CHECK: top.weight {name = "w"} : tensor<3x2x3x3xi4>
  %w = top.weight {name = "w"} : tensor<3x2x3x3xi4>
  %v = top.weight {name = "v"} : tensor<3x3xi8>
  %b = top.weight {name = "b"} : tensor<3xi32>
  %m = top.weight {name = "m"} : tensor<3xi32>
  %s = top.weight {name = "s"} : tensor<3xi8>
  // CHECK: quant.conv {{.*}} rounding = "half_up", weight_bits = 4 : i32, name = "c"} : {{.*}}tensor<3x2x3x3xi4>
  %c = quant.conv %q, %w, %b, %m, %s {strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, group = 1 : i64, layout = "nhwc", zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up", weight_bits = 4 : i32, name = "c"} : (tensor<1x4x4x2x!quant.uniform<i8:f32, 0.5:0>>, tensor<3x2x3x3xi4>, tensor<3xi32>, tensor<3xi32>, tensor<3xi8>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>
  // CHECK: quant.linear {{.*}} weight_bits = 4 : i32, name = "l"} : {{.*}}tensor<3x3xi8>
  %l = quant.linear %c, %v, %b, %m, %s {zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up", weight_bits = 4 : i32, name = "l"} : (tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>, tensor<3x3xi8>, tensor<3xi32>, tensor<3xi32>, tensor<3xi8>) -> tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>
  func.return %l : tensor<1x2x2x3x!quant.uniform<i8:f32, 0.5:0>>
}
