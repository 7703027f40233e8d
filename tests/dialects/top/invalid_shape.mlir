// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: layer "block3/relu" (top.relu): result is tensor<2x3xf32>, its operands and attributes give tensor<2x2xf32>
func.func @main(%x: tensor<2x2xf32>) -> tensor<2x3xf32> {
  %y = top.relu %x {name = "block3/relu"} : (tensor<2x2xf32>) -> tensor<2x3xf32>
  func.return %y : tensor<2x3xf32>
}
