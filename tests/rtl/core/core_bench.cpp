// Runs a program on tw_top and prints every cycle: what model.py is compared with.
//
// Arguments: code file, SRAM dump file, cycles at most, fault, then R registers as `r=value`.
// Every byte of DDR reads as a function of its address.

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "Vtw_top.h"
#include "verilated.h"

double sc_time_stamp() { return 0; }

namespace {

using Bytes = std::vector<uint8_t>;

Bytes read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

void cycle(Vtw_top& top) {
  top.clk = 0;
  top.eval();
  top.clk = 1;
  top.eval();
}

// Bytes of a port, whatever type Verilator chose for it.
template <typename Port>
uint8_t* bytes_of(Port& port) {
  return reinterpret_cast<uint8_t*>(&port);
}

}  // namespace

int main(int argc, char** argv) {
  Verilated::randReset(2);
  Verilated::randSeed(1234);
  const Bytes code = read_file(argv[1]);
  const uint64_t limit = std::strtoull(argv[3], nullptr, 0);
  const bool quiet = limit > 10000000;
  Vtw_top top;
  top.run = 0;
  top.rst = 1;
  top.config_write = 0;
  top.code_length = static_cast<uint32_t>(code.size() / 64);
  top.fault = static_cast<uint8_t>(std::atoi(argv[4]));
  top.counter_select = 0;
  top.debug_address = 0;
  for (int i = 0; i < 3; ++i) cycle(top);
  top.rst = 0;
  for (int i = 5; i < argc; ++i) {
    char* end = nullptr;
    top.config_write = 1;
    top.config_register = static_cast<uint8_t>(std::strtoul(argv[i], &end, 0));
    top.config_value = std::strtoull(end + 1, nullptr, 0);
    cycle(top);
  }
  top.config_write = 0;
  for (int i = 0; i < 5; ++i) cycle(top);  // nothing may move before `run`
  top.run = 1;
  top.clk = 0;
  top.eval();  // the state is that of cycle 0
  uint64_t t = 0;
  for (; t < limit; ++t) {
    if (!quiet) {
      std::printf("%" PRIu64 " %d start %x done %x", t,
                  top.dispatch_valid ? top.dispatch_engine : -1, top.start, top.done);
      if (top.mem_valid)
        std::printf(" mem %d%d %" PRIx64, top.mem_code, top.mem_write,
                    static_cast<uint64_t>(top.mem_address));
      std::printf(" bank %x ddr %x queue %x idle %x zero %x active %d\n", top.bank_stall,
                  top.ddr_stall, top.queue_valid, top.engine_idle, top.semaphore_zero,
                  top.active);
    }
    if (top.finished || top.trapped) break;
    // What a read of this cycle brings in the next one.
    Bytes next(G_BYTES, 0xEE);
    if (top.mem_valid && !top.mem_write) {
      for (unsigned i = 0; i < G_BYTES; ++i) {
        const uint64_t at = top.mem_address + i;
        next[i] = top.mem_code ? (at < code.size() ? code[at] : 0xFF) : uint8_t(at * 7 + 13);
      }
    }
    cycle(top);
    std::memcpy(bytes_of(top.mem_read_data), next.data(), G_BYTES);
    top.eval();
  }
  std::printf("%s %" PRIu64 "\n", top.finished ? "finished" : top.trapped ? "trapped" : "limit",
              t);
  // Nothing changes afterwards.
  for (int i = 0; i < 200; ++i) {
    cycle(top);
    if ((top.finished || top.trapped) && (top.dispatch_valid || (top.finished && top.active)))
      std::printf("moves after the end\n");
  }
  std::printf("counters");
  for (unsigned i = 0; i <= 48; ++i) {
    top.counter_select = static_cast<uint8_t>(i);
    top.eval();
    std::printf(" %" PRIu64, static_cast<uint64_t>(top.counter_value));
  }
  std::printf("\ndigest %016" PRIx64 "\n", static_cast<uint64_t>(top.target_digest));
  std::ofstream dump(argv[2], std::ios::binary);
  for (unsigned word = 0; word < SRAM_WORDS; ++word) {
    top.debug_address = word;
    top.eval();
    dump.write(reinterpret_cast<char*>(bytes_of(top.debug_data)), W_BYTES);
  }
  return 0;
}
