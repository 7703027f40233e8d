// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: vec_table has no field `n0`
tpu.timing_constraint "vec_table" #tpu.f<n0 = 3> cycles 8 {clock_fs = 1 : i64, count = 1 : i64, highest = 8 : i64, layer = "a", lowest = 7 : i64, waveform = "r.vcd"}
