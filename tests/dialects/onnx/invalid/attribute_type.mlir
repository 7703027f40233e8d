// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: attribute 'axis' must be INT, not 1.000000e+00 : f32

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xf32>, %z: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %y = "onnx.Softmax"(%x) {axis = 1.0 : f32, name = "n", outputs = ["y"]} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    func.return %y : tensor<2x4xf32>
  }
}
