// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: Relu takes 1 to 1 inputs in opset 17, not 2

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xf32>, %z: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %y = "onnx.Relu"(%x, %z) {name = "n", outputs = ["y"]} : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
    func.return %y : tensor<2x4xf32>
  }
}
