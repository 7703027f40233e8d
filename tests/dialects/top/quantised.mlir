// RUN: tpu-mlir-opt %s | filecheck %s

// Movers keep the quantised element type.
// CHECK: func.func @main
func.func @main(%x: tensor<1x4x4x2x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<32x!quant.uniform<i8:f32, 0.5:3>> {
  // CHECK: top.transpose {{.*}} -> tensor<1x2x4x4x!quant.uniform<i8:f32, 0.5:3>>
  %t = top.transpose %x {name = "t", perm = array<i64: 0, 3, 1, 2>} : (tensor<1x4x4x2x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<1x2x4x4x!quant.uniform<i8:f32, 0.5:3>>
  // CHECK: top.reshape {{.*}} -> tensor<32x!quant.uniform<i8:f32, 0.5:3>>
  %r = top.reshape %t {name = "r"} : (tensor<1x2x4x4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<32x!quant.uniform<i8:f32, 0.5:3>>
  func.return %r : tensor<32x!quant.uniform<i8:f32, 0.5:3>>
}
