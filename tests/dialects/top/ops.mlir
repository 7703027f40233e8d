// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | filecheck %s --check-prefix=GENERIC

// CHECK: func.func @main
func.func @main(%x: tensor<1x4x4x2xf32>) -> tensor<1x3xf32> {
  // CHECK: [[W:%.*]] = top.weight {name = "w"} : tensor<3x2x3x3xf32>
  %w = top.weight {name = "w"} : tensor<3x2x3x3xf32>
  // CHECK: [[N:%.*]] = top.none : none
  %n = top.none : none
  // CHECK: top.conv {{%.*}}, [[W]], [[N]] {name = "c", strides = array<i64: 1, 1>, pads = array<i64: 1, 1, 1, 1>, dilations = array<i64: 1, 1>, group = 1 : i64, clamp_min = 0.000000e+00 : f32, layout = "nhwc", fused = ["bn", "relu"]}
  // GENERIC: "top.conv"(
  %c = top.conv %x, %w, %n {name = "c", strides = array<i64: 1, 1>, pads = array<i64: 1, 1, 1, 1>, dilations = array<i64: 1, 1>, group = 1 : i64, clamp_min = 0.000000e+00 : f32, layout = "nhwc", fused = ["bn", "relu"]} : (tensor<1x4x4x2xf32>, tensor<3x2x3x3xf32>, none) -> tensor<1x4x4x3xf32>
  // CHECK: top.max_pool {{%.*}} {name = "p", kernel = array<i64: 2, 2>, strides = array<i64: 2, 2>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, ceil_mode = false, layout = "nhwc"} : (tensor<1x4x4x3xf32>) -> tensor<1x2x2x3xf32>
  %p = top.max_pool %c {name = "p", kernel = array<i64: 2, 2>, strides = array<i64: 2, 2>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, ceil_mode = false, layout = "nhwc"} : (tensor<1x4x4x3xf32>) -> tensor<1x2x2x3xf32>
  // CHECK: top.concat {{%.*}}, {{%.*}}, {{%.*}} {name = "k", axis = 1 : i64}
  %k = top.concat %p, %p, %p {name = "k", axis = 1 : i64} : (tensor<1x2x2x3xf32>, tensor<1x2x2x3xf32>, tensor<1x2x2x3xf32>) -> tensor<1x6x2x3xf32>
  // CHECK: top.clip {{%.*}} {name = "l", min = -1.000000e+00 : f32}
  %l = top.clip %k {name = "l", min = -1.000000e+00 : f32} : (tensor<1x6x2x3xf32>) -> tensor<1x6x2x3xf32>
  // CHECK: [[V:%.*]], [[I:%.*]] = top.topk {{%.*}} {name = "t"
  %v, %i = top.topk %l {name = "t", k = 2 : i64, axis = 1 : i64, largest = true, sorted = true} : (tensor<1x6x2x3xf32>) -> (tensor<1x2x2x3xf32>, tensor<1x2x2x3xi64>)
  // CHECK: top.cast [[I]] {name = "i"} : (tensor<1x2x2x3xi64>) -> tensor<1x2x2x3xf32>
  %f = top.cast %i {name = "i"} : (tensor<1x2x2x3xi64>) -> tensor<1x2x2x3xf32>
  // CHECK: top.add [[V]], {{%.*}} {name = "a", clamp_max = 6.000000e+00 : f32}
  %a = top.add %v, %f {name = "a", clamp_max = 6.000000e+00 : f32} : (tensor<1x2x2x3xf32>, tensor<1x2x2x3xf32>) -> tensor<1x2x2x3xf32>
  // CHECK: top.reduce {{%.*}} {name = "r", kind = "mean", axes = array<i64: 1, 2>, keepdims = false}
  %r = top.reduce %a {name = "r", kind = "mean", axes = array<i64: 1, 2>, keepdims = false} : (tensor<1x2x2x3xf32>) -> tensor<1x3xf32>
  func.return %r : tensor<1x3xf32>
}
