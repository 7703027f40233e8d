// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s

// Names with quotes, tabs and letters outside ASCII, infinite attributes and absent operands survive.

// CHECK: onnx.opset = {"" = 17 : i64}
module attributes {onnx.opset = {"" = 17 : i64}} {
  // CHECK-LABEL: func.func @main
  func.func @main(%x: tensor<1x3x8x8xf32>) -> tensor<1x4x4x4xf32> attributes {arg_names = ["x"], result_names = ["sortie \C3\A9t\C3\A9"]} {
    // CHECK: "onnx.Constant"() {value = #onnx.weight<"conv1/w">
    %w = "onnx.Constant"() {value = #onnx.weight<"conv1/w">, name = "conv1/w", outputs = ["conv1/w"]} : () -> tensor<4x3x3x3xf32>
    // CHECK: [[NONE:%.*]] = "onnx.none"() : () -> none
    %none = "onnx.none"() : () -> none
    // CHECK: "onnx.Conv"(%x, %w, [[NONE]]) {strides = array<i64: 2, 2>, pads = array<i64: 1, 1, 1, 1>, name = "a\09\22b\22", outputs = ["t"]}
    %t = "onnx.Conv"(%x, %w, %none) {strides = array<i64: 2, 2>, pads = array<i64: 1, 1, 1, 1>, name = "a\09\22b\22", outputs = ["t"]} : (tensor<1x3x8x8xf32>, tensor<4x3x3x3xf32>, none) -> tensor<1x4x4x4xf32>
    // CHECK: "onnx.LeakyRelu"([[T:%.*]]) {alpha = 0x7f800000 : f32, name = "leaky", outputs = ["sortie \C3\A9t\C3\A9"]}
    %y = "onnx.LeakyRelu"(%t) {alpha = 0x7f800000 : f32, name = "leaky", outputs = ["sortie \C3\A9t\C3\A9"]} : (tensor<1x4x4x4xf32>) -> tensor<1x4x4x4xf32>
    func.return %y : tensor<1x4x4x4xf32>
  }
}
