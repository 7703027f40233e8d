// RUN: tpu-mlir-opt %s "--top-assign-layout=layout=nhwc" | filecheck %s

// CHECK-LABEL: func.func @main
// CHECK:      [[X:%.*]] = top.transpose {{.*}} {name = "arg0/to_nhwc", perm = array<i64: 0, 2, 3, 1>}
// CHECK-NEXT: [[P:%.*]] = top.max_pool [[X]] {{.*}}layout = "nhwc"{{.*}} -> tensor<1x2x2x3xf32>
// CHECK-NEXT: [[S:%.*]] = top.softmax [[P]] {{.*}}axis = 3 : i64
// CHECK-NEXT: [[Y:%.*]] = top.transpose [[S]] {name = "s/to_nchw", perm = array<i64: 0, 3, 1, 2>}
// CHECK-NEXT: return [[Y]]
func.func @main(%x: tensor<1x3x4x4xf32>) -> tensor<1x3x2x2xf32> {
  %p = top.max_pool %x {name = "p", kernel = array<i64: 2, 2>, strides = array<i64: 2, 2>, pads = array<i64: 0, 0, 0, 0>, dilations = array<i64: 1, 1>, ceil_mode = false} : (tensor<1x3x4x4xf32>) -> tensor<1x3x2x2xf32>
  %s = top.softmax %p {name = "s", axis = 1 : i64} : (tensor<1x3x2x2xf32>) -> tensor<1x3x2x2xf32>
  func.return %s : tensor<1x3x2x2xf32>
}
