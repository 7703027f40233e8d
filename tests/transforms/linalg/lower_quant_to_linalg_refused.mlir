// RUN: not tpu-mlir-opt --lower-quant-to-linalg %s 2>&1 | filecheck %s

// An op that the partition did not see is named, with the pass that is missing.
// CHECK: error[E0501]: quant.requantize "late" belongs to no segment
// CHECK: hint: run the pass quant-partition first

func.func @main(%x: tensor<4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<4x!quant.uniform<i8:f32, 1.0:7>> {
  %y = quant.requantize %x {name = "late", mult = 5 : i64, shift = 3 : i64, bias = 0 : i64, bias_shift = 0 : i64, zp = 7 : i64, lo = -127 : i64, hi = 100 : i64, rounding = "half_up"} : (tensor<4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<4x!quant.uniform<i8:f32, 1.0:7>>
  func.return %y : tensor<4x!quant.uniform<i8:f32, 1.0:7>>
}
