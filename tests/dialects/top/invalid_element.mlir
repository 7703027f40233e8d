// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// Tensors of unlike scales cannot meet without a requantisation.
// CHECK: layer "cat" (top.concat): element types differ: !quant.uniform<i8:f32, 0.5:0>, !quant.uniform<i8:f32, 0.25:0>
func.func @main(%x: tensor<2x!quant.uniform<i8:f32, 0.5:0>>, %y: tensor<2x!quant.uniform<i8:f32, 0.25:0>>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>> {
  %z = top.concat %x, %y {name = "cat", axis = 0 : i64} : (tensor<2x!quant.uniform<i8:f32, 0.5:0>>, tensor<2x!quant.uniform<i8:f32, 0.25:0>>) -> tensor<4x!quant.uniform<i8:f32, 0.5:0>>
  func.return %z : tensor<4x!quant.uniform<i8:f32, 0.5:0>>
}
