// RUN: not tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --hardware-config=tpu_v2 %s 2>&1 | filecheck %s

// A module quantised for one rounding is not tiled for a chip with another.
// CHECK: error[E0501]: layer "pool" was quantised for another chip
// CHECK: it rounds half_up; `tpu_v2` rounds truncate

func.func @main(%x: tensor<1x8x8x4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x1x1x4x!quant.uniform<i8:f32, 0.5:0>> attributes {arg_names = ["x"]} {
  %s = quant.avg_pool %x {name = "pool", segment = 0 : i32, device = "tpu", kernel = array<i64: 8, 8>, strides = array<i64: 1, 1>, pads = array<i64: 0, 0, 0, 0>, layout = "nhwc", bias = 0 : i64, mult = 1073741824 : i64, shift = 36 : i64, zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up"} : (tensor<1x8x8x4x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<1x1x1x4x!quant.uniform<i8:f32, 0.5:0>>
  func.return %s : tensor<1x1x1x4x!quant.uniform<i8:f32, 0.5:0>>
}
