// RUN: tpu-mlir-opt %s --top-fuse-activation | filecheck %s
// RUN: tpu-mlir-opt %s --top-fuse-activation --top-fuse-activation | filecheck %s

// CHECK-LABEL: func.func @main
// CHECK:     [[A:%.*]] = top.add {{.*}} {name = "sum", clamp_min = 0.000000e+00 : f32, fused = ["relu"]}
// CHECK-NOT: top.relu
// CHECK:     return [[A]]
func.func @main(%x: tensor<2x2xf32>) -> tensor<2x2xf32> {
  %a = top.add %x, %x {name = "sum"} : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
  %r = top.relu %a {name = "relu"} : (tensor<2x2xf32>) -> tensor<2x2xf32>
  func.return %r : tensor<2x2xf32>
}
