// RUN: tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --hardware-config=tiny8 %s | filecheck %s
// RUN: tpu-mlir-opt "--pass-pipeline=lower-quant-to-linalg,tile-and-bufferize{fuse=false}" --hardware-config=tiny8 %s | filecheck %s --check-prefix=APART
// RUN: tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --hardware-config=tiny8 --mlir-print-op-generic %s | mlir-opt | filecheck %s --check-prefix=STOCK

// One nest: the tile of the other operand is loaded before the reduction, and joined in place.
// CHECK:      func.func @tpu_0
// CHECK:      memref.alloc() {role = "accumulator"
// CHECK:      memref.alloc() {role = "input", slots = 1 : i32, layer = "mean"} : memref<5x5x8xi8, 1 : i32>
// CHECK:      %[[Z:[a-z0-9]+]] = memref.alloc() {role = "input", slots = 1 : i32, layer = "mean"} : memref<4x4x8xi8, 1 : i32>
// CHECK:      kind = "sum"
// CHECK:      %[[T:[a-z0-9]+]] = memref.alloc() {role = "output", slots = 1 : i32, layer = "mean"} : memref<4x4x8xi8, 1 : i32>
// CHECK:      kind = "requant"
// CHECK:      linalg.generic
// CHECK-SAME: ins(%[[Z]], %[[T]] : {{.*}}) outs(%[[T]] :
// CHECK-SAME: kind = "eltwise", mult_a = 5 : i64, mult_b = 7 : i64
// CHECK-SAME: function = "sub", layer = "rest"
// CHECK:      "memref.copy"(%[[T]]
// CHECK:      func.return

// APART:      kind = "requant"
// APART:      memref.alloc() {role = "input", slots = 1 : i32, layer = "rest"}
// APART:      memref.alloc() {role = "input", slots = 1 : i32, layer = "rest"}
// APART:      memref.alloc() {role = "output", slots = 1 : i32, layer = "rest"}
// APART:      kind = "eltwise"

// STOCK: func.func @tpu_0

func.func @main(%x: tensor<1x5x5x8x!quant.uniform<i8:f32, 0.5:0>>, %z: tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>> attributes {arg_names = ["x", "z"]} {
  %c = quant.avg_pool %x {name = "mean", segment = 0 : i32, device = "tpu", kernel = array<i64: 2, 2>, strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, layout = "nhwc", bias = 0 : i64, mult = 1073741824 : i64, shift = 32 : i64, zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up"} : (tensor<1x5x5x8x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>
  %y = quant.sub %z, %c {name = "rest", segment = 0 : i32, device = "tpu", mult_a = 5 : i64, mult_b = 7 : i64, shift = 3 : i64, bias = 0 : i64, bias_shift = 0 : i64, zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up"} : (tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>, tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>
  func.return %y : tensor<1x4x4x8x!quant.uniform<i8:f32, 0.5:0>>
}
