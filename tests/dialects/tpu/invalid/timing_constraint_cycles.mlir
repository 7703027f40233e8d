// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: cycles must lie in lowest..highest, not 9
tpu.timing_constraint "dma_load" cycles 9 {clock_fs = 1 : i64, count = 1 : i64, highest = 8 : i64, layer = "a", lowest = 7 : i64, waveform = "r.vcd"}
