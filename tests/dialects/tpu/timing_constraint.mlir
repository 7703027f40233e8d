// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s

tpu.program @tpu_0 {
  tpu.halt
}
// CHECK: tpu.timing_constraint "dma_load" #tpu.f<n0 = 64, stream = 1> cycles 412 {clock_fs = 2000000 : i64, count = 3 : i64, highest = 430 : i64, layer = "conv1", lowest = 400 : i64, waveform = "run.vcd"}
tpu.timing_constraint "dma_load" #tpu.f<n0 = 64, stream = 1> cycles 412 {clock_fs = 2000000 : i64, count = 3 : i64, highest = 430 : i64, layer = "conv1", lowest = 400 : i64, waveform = "run.vcd"}
// CHECK-NEXT: tpu.timing_constraint "vec_table" cycles 35
tpu.timing_constraint "vec_table" cycles 35 {clock_fs = 1 : i64, count = 1 : i64, highest = 35 : i64, layer = "a", lowest = 35 : i64, waveform = "r.vcd"}
