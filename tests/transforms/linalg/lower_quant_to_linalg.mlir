// RUN: tpu-mlir-opt --lower-quant-to-linalg %s | filecheck %s
// RUN: tpu-mlir-opt --lower-quant-to-linalg --lower-quant-to-linalg %s | filecheck %s
// RUN: tpu-mlir-opt --lower-quant-to-linalg --mlir-print-op-generic %s | mlir-opt | filecheck %s --check-prefix=STOCK

// Each TPU segment becomes a function, a host segment a declaration, @main calls them in order.
// CHECK:      func.func private @host_0(tensor<4xf32>) -> tensor<4xi8> attributes {arg_names = ["arg0"], result_names = ["q"]
// CHECK:      func.func @tpu_1(%{{.*}}: tensor<4xi8>) -> tensor<4xi8> attributes {arg_names = ["q"], result_names = ["s"]}
// CHECK:      linalg.generic
// CHECK-SAME: ins(%[[X:.*]], %[[X]] : tensor<4xi8>, tensor<4xi8>)
// CHECK-SAME: layer = "s"
// CHECK:      arith.extsi %{{.*}} : i8 to i64
// Zero point 3 of the operand is taken off before the multiplier.
// CHECK:      arith.constant 3 : i64
// CHECK:      arith.subi
// CHECK:      arith.constant 5 : i64
// CHECK:      arith.muli
// CHECK:      arith.addi
// half_up: add half a step, shift.
// CHECK:      arith.shli
// CHECK:      arith.shrui
// CHECK:      arith.addi
// CHECK:      arith.shrsi
// Output zero point, then the clamp.
// CHECK:      arith.constant 7 : i64
// CHECK:      arith.constant -127 : i64
// CHECK-NEXT: arith.maxsi
// CHECK:      arith.constant 100 : i64
// CHECK-NEXT: arith.minsi
// CHECK-NEXT: arith.trunci %{{.*}} : i64 to i8
// CHECK:      func.func private @host_2
// CHECK:      func.func @main
// CHECK-NEXT: func.call @host_0
// CHECK-NEXT: func.call @tpu_1
// CHECK-NEXT: func.call @host_2
// CHECK-NOT:  quant.add %

// STOCK: func.func @tpu_1

func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %q = quant.quantize %x {name = "q", segment = 0 : i32, device = "host"} : (tensor<4xf32>) -> tensor<4x!quant.uniform<i8:f32, 0.5:3>>
  %s = quant.add %q, %q {name = "s", segment = 1 : i32, device = "tpu", mult_a = 5 : i64, mult_b = 6 : i64, shift = 3 : i64, bias = 0 : i64, bias_shift = 0 : i64, zp = 7 : i64, lo = -127 : i64, hi = 100 : i64, rounding = "half_up"} : (tensor<4x!quant.uniform<i8:f32, 0.5:3>>, tensor<4x!quant.uniform<i8:f32, 0.5:3>>) -> tensor<4x!quant.uniform<i8:f32, 1.0:7>>
  %y = quant.dequantize %s {name = "y", segment = 2 : i32, device = "host"} : (tensor<4x!quant.uniform<i8:f32, 1.0:7>>) -> tensor<4xf32>
  func.return %y : tensor<4xf32>
}
