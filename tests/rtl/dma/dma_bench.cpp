// Drives one tw_dma: instructions one after another, memories behind grants that a schedule allows.
//
// Usage: dma_bench SCENARIO LOG MEMORIES. SCENARIO (bench.py writes it): nine 64-bit numbers
// (instructions, schedule length, address of DDR's window, bytes of DDR, bytes of SRAM, fault, cycle
// limit, W, G), then for each instruction a 64-bit gap (cycles from the end of the last one to
// `head_valid`; 0: valid all along) and 64 bytes, then the schedule (a byte a cycle: bit 0 DMA tick,
// 1 DDR may grant, 2 SRAM may grant; repeated), DDR, SRAM.
// LOG has a line for each thing seen, as model.py writes them; MEMORIES the final DDR and SRAM.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "Vdma_bench.h"
#include "verilated.h"

namespace {

template <typename T> uint8_t byte_of(const T &value, unsigned i) {
  return static_cast<uint8_t>(value >> (8 * i));
}
template <std::size_t N> uint8_t byte_of(const VlWide<N> &value, unsigned i) {
  return static_cast<uint8_t>(value.at(i / 4) >> (8 * (i % 4)));
}
template <typename T> void set_bytes(T &value, const uint8_t *bytes, unsigned count) {
  T sum = 0;
  for (unsigned i = 0; i < count; ++i) sum |= static_cast<T>(static_cast<uint64_t>(bytes[i]) << (8 * i));
  value = sum;
}
template <std::size_t N> void set_bytes(VlWide<N> &value, const uint8_t *bytes, unsigned count) {
  for (std::size_t i = 0; i < N; ++i) value.at(i) = 0;
  for (unsigned i = 0; i < count; ++i)
    value.at(i / 4) |= static_cast<uint32_t>(bytes[i]) << (8 * (i % 4));
}

// One memory behind a port: read data are there in the next cycle only, else rubbish.
struct Memory {
  std::vector<uint8_t> bytes;
  uint64_t base = 0;
  unsigned unit = 0;
  std::vector<uint8_t> arriving;
  uint64_t rubbish = 1;

  uint8_t &at(uint64_t address) { return bytes[(address - base) % bytes.size()]; }

  template <typename T> void drive(T &port) {
    if (arriving.empty()) {
      for (unsigned i = 0; i < unit; ++i) {
        rubbish = rubbish * 6364136223846793005u + 1442695040888963407u;
        arriving.push_back(static_cast<uint8_t>(rubbish >> 56));
      }
    }
    set_bytes(port, arriving.data(), unit);
    arriving.clear();
  }

  // Executes a granted access and appends its line to the log.
  template <typename M, typename D>
  void access(std::string &log, const char *name, uint64_t t, bool granted, bool write, bool burst,
              uint64_t address, const M &mask, const D &data) {
    char text[64];
    std::snprintf(text, sizeof text, "%llu %s%s%s%s %llx", static_cast<unsigned long long>(t), name,
                  write ? " write" : " read", burst ? " burst" : "", granted ? " granted" : "",
                  static_cast<unsigned long long>(address));
    log += text;
    if (write) {
      log += ' ';
      for (unsigned i = 0; i < unit; ++i) {
        const bool on = (byte_of(mask, i / 8) >> (i % 8)) & 1;
        std::snprintf(text, sizeof text, "%02x", byte_of(data, i));
        log += on ? text : "--";
        if (on && granted) at(address + i) = byte_of(data, i);
      }
    } else if (granted) {
      for (unsigned i = 0; i < unit; ++i) arriving.push_back(at(address + i));
    }
    log += '\n';
  }
};

struct Instruction {
  uint64_t gap;
  uint8_t word[64];
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> input((std::istreambuf_iterator<char>(file)), {});
  const char *from = input.data();
  const auto take = [&](void *to, std::size_t count) {
    std::memcpy(to, from, count);
    from += count;
  };
  uint64_t header[9];
  take(header, sizeof header);
  std::vector<Instruction> program(header[0]);
  for (auto &item : program) {
    take(&item.gap, 8);
    take(item.word, 64);
  }
  std::vector<uint8_t> schedule(header[1]);
  take(schedule.data(), schedule.size());
  Memory ddr, sram;
  ddr.base = header[2];
  ddr.bytes.resize(header[3]);
  sram.bytes.resize(header[4]);
  take(ddr.bytes.data(), ddr.bytes.size());
  take(sram.bytes.data(), sram.bytes.size());
  sram.unit = static_cast<unsigned>(header[7]);
  ddr.unit = static_cast<unsigned>(header[8]);

  VerilatedContext context;
  context.randReset(2);  // registers start with anything: reset and pop must set what matters
  context.randSeed(1);
  Vdma_bench dut(&context);
  dut.fault = static_cast<uint8_t>(header[5]);
  dut.rst = 1;
  for (int i = 0; i < 2; ++i) {
    dut.clk = 0;
    dut.eval();
    dut.clk = 1;
    dut.eval();
  }
  dut.rst = 0;

  std::string log;
  std::size_t popped = 0, ended = 0;
  uint64_t idle_for = 0;
  bool was_idle = true;
  const auto note = [&](uint64_t t, const std::string &text) {
    log += std::to_string(t) + ' ' + text + '\n';
  };
  for (uint64_t t = 0; t < header[6] && ended < program.size(); ++t) {
    const uint8_t now = schedule[t % schedule.size()];
    const bool more = popped < program.size();
    dut.clk = 0;
    dut.tick = now & 1;
    dut.head_valid = more && idle_for >= program[popped].gap;
    if (more) set_bytes(dut.head, program[popped].word, 64);
    sram.drive(dut.sram_data);
    ddr.drive(dut.ddr_data);
    dut.sram_granted = 0;
    dut.ddr_granted = 0;
    dut.eval();
    dut.ddr_granted = dut.ddr_valid && (now & 2);
    dut.sram_granted = dut.sram_valid && (now & 4);
    dut.eval();
    if (dut.idle != was_idle) note(t, dut.idle ? "idle" : "busy");
    was_idle = dut.idle;
    if (dut.pop) note(t, "pop");
    if (dut.sram_valid)
      sram.access(log, "sram", t, dut.sram_granted, dut.sram_write, false, dut.sram_address,
                  dut.sram_mask, dut.sram_write_data);
    if (dut.ddr_valid)
      ddr.access(log, "ddr", t, dut.ddr_granted, dut.ddr_write, dut.ddr_burst, dut.ddr_address,
                 dut.ddr_mask, dut.ddr_write_data);
    if (dut.done) note(t, "done " + std::to_string(dut.done_signals));
    if (dut.pop) ++popped;
    idle_for = dut.done ? 0 : idle_for + 1;
    if (dut.done) ++ended;
    dut.clk = 1;
    dut.eval();
  }
  dut.final();
  std::ofstream(argv[2], std::ios::binary) << log;
  std::ofstream memories(argv[3], std::ios::binary);
  memories.write(reinterpret_cast<const char *>(ddr.bytes.data()), static_cast<std::streamsize>(ddr.bytes.size()));
  memories.write(reinterpret_cast<const char *>(sram.bytes.data()), static_cast<std::streamsize>(sram.bytes.size()));
  return 0;
}
