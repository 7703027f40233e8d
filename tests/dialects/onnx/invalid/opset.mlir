// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: opset 17 has no operator Gelu

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xf32>, %z: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %y = "onnx.Gelu"(%x) {name = "n", outputs = ["y"]} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    func.return %y : tensor<2x4xf32>
  }
}
