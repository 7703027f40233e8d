// RUN: tpu-mlir-opt %s | tpu-mlir-opt | filecheck %s
// RUN: tpu-mlir-opt %s --mlir-print-op-generic | filecheck %s --check-prefix GENERIC

// CHECK-LABEL: tpu.program @tpu_0 attributes {target = "tiny8"} {
tpu.program @tpu_0 attributes {target = "tiny8"} {
  // Enum names, semaphores as lists, addresses in hexadecimal; defaults are left out.
  // CHECK-NEXT: tpu.dma_load #tpu.f<signal = [3], ddr = 0x1000, ddr_r = 1, n0 = 64> {layer = "conv1"}
  // GENERIC: "tpu.dma_load"() <{f = #tpu.f<signal = [3], ddr = 0x1000, ddr_r = 1, n0 = 64>}> {layer = "conv1"} : () -> ()
  tpu.dma_load #tpu.f<n0 = 64, signal = [3], ddr = 4096, ddr_r = 1, channel = 0> {layer = "conv1"}
  // CHECK-NEXT: tpu.vec_eltwise #tpu.f<wait = [3, 14], op = mul, a = 0x40, za = -3> {layer = "mul1"}
  tpu.vec_eltwise #tpu.f<wait = [3, 14], dtype = int8, op = mul, a = 0x40, za = -3> {layer = "mul1"}
  // CHECK-NEXT: tpu.halt
  tpu.halt
// CHECK-NEXT: }
}
