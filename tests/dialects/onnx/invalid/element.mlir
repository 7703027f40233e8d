// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s
// CHECK: input 0 (X) must be one of tensor(bfloat16), tensor(double), tensor(float), tensor(float16), not tensor(int32)

module attributes {onnx.opset = {"" = 17 : i64}} {
  func.func @main(%x: tensor<2x4xi32>, %z: tensor<2x4xf32>) -> tensor<2x4xi32> {
    %y = "onnx.Sigmoid"(%x) {name = "n", outputs = ["y"]} : (tensor<2x4xi32>) -> tensor<2x4xi32>
    func.return %y : tensor<2x4xi32>
  }
}
