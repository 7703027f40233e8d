// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: input 1 (B) must be tensor(float) like the others of type T, not tensor(double)

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xf32>, %z: tensor<2x4xf64>) -> tensor<2x4xf32> {
    %y = "onnx.Add"(%x, %z) {name = "n", outputs = ["y"]} : (tensor<2x4xf32>, tensor<2x4xf64>) -> tensor<2x4xf32>
    func.return %y : tensor<2x4xf32>
  }
}
