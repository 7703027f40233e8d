// RUN: tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --hardware-config=tiny8 %s | filecheck %s
// RUN: tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --tile-and-bufferize --hardware-config=tiny8 %s | filecheck %s
// RUN: tpu-mlir-opt --lower-quant-to-linalg --tile-and-bufferize --hardware-config=tiny8 --mlir-print-op-generic %s | mlir-opt | filecheck %s --check-prefix=STOCK

// The addition of 2 x 50 x 400 codes does not fit 32 KB with its operands: rows of 400 in tiles.
// CHECK:      func.func @tpu_0(%[[X:.*]]: memref<2x50x400xi8>, %[[B:.*]]: memref<400xi8>, %[[Y:.*]]: memref<2x50x400xi8>)
// CHECK-SAME: arg_names = ["x", "b", "sum"], result_names = ["sum"]
// The row that is the same for all tiles is loaded once, with one slot.
// CHECK:      memref.alloc() {role = "input", slots = 1 : i32, layer = "sum"} : memref<1x[[C:[0-9]+]]xi8, 1 : i32>
// CHECK:      affine.for %[[I:.*]] = 0 to 100 step [[STEP:[0-9]+]]
// CHECK:        memref.alloc() {role = "input", slots = 2 : i32, layer = "sum"} : memref<[[STEP]]x[[C]]xi8, 1 : i32>
// CHECK:        memref.subview %{{.*}}[%[[I]], 0]
// CHECK:        "memref.copy"
// CHECK:        memref.alloc() {role = "output", slots = 2 : i32, layer = "sum"} : memref<[[STEP]]x[[C]]xi8, 1 : i32>
// CHECK:        linalg.generic
// CHECK-SAME:   affine_map<(d0, d1) -> (0, d1)>
// CHECK-SAME:   kind = "eltwise", mult_a = 5 : i64, mult_b = 5 : i64, shift = 3 : i64
// CHECK-SAME:   function = "add"
// CHECK:        "memref.copy"
// CHECK:      func.func @main
// CHECK:      %[[OUT:.*]] = memref.alloc() : memref<2x50x400xi8>
// CHECK-NEXT: func.call @tpu_0(%{{.*}}, %{{.*}}, %[[OUT]])
// CHECK-NEXT: func.return %[[OUT]]

// STOCK: func.func @tpu_0

func.func @main(%x: tensor<2x50x400x!quant.uniform<i8:f32, 0.5:0>>, %b: tensor<400x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<2x50x400x!quant.uniform<i8:f32, 0.5:0>> attributes {arg_names = ["x", "b"]} {
  %s = quant.add %x, %b {name = "sum", segment = 0 : i32, device = "tpu", mult_a = 5 : i64, mult_b = 5 : i64, shift = 3 : i64, bias = 0 : i64, bias_shift = 0 : i64, zp = 0 : i64, lo = -127 : i64, hi = 127 : i64, rounding = "half_up"} : (tensor<2x50x400x!quant.uniform<i8:f32, 0.5:0>>, tensor<400x!quant.uniform<i8:f32, 0.5:0>>) -> tensor<2x50x400x!quant.uniform<i8:f32, 0.5:0>>
  func.return %s : tensor<2x50x400x!quant.uniform<i8:f32, 0.5:0>>
}
