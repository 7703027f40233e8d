// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: Relu has no attribute 'alpha' in opset 17; legal: none

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xf32>, %z: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %y = "onnx.Relu"(%x) {alpha = 1.0 : f32, name = "n", outputs = ["y"]} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    func.return %y : tensor<2x4xf32>
  }
}
