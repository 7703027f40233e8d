// Runs a scenario on the vector unit: instructions one after another, an SRAM with one cycle of
// latency, grants refused by a given pattern, halves of the M registers that fill after given
// times. Usage: bench SCENARIO TRACE MEMORY. The format is that of `Scenario.write`, programs.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "Vbench.h"
#include "verilated.h"

namespace {

struct Reader {
  std::ifstream file;
  explicit Reader(const char* path) : file(path, std::ios::binary) {}
  int64_t number() {
    int64_t value = 0;
    bytes(&value, sizeof value);
    return value;
  }
  void bytes(void* to, size_t count) {
    file.read(static_cast<char*>(to), static_cast<std::streamsize>(count));
    if (!file) {
      std::fprintf(stderr, "the scenario ends early\n");
      std::exit(2);
    }
  }
};

struct Instruction {
  int64_t hold;  // cycles the head stays away after the pop before
  uint8_t word[64];
};

struct Poke {
  int64_t instruction;  // written to memory in the cycle of its pop
  int64_t address;
  std::vector<uint8_t> bytes;
};

struct Event {
  int32_t cycle, kind, value, granted;
};

enum { POP, READ_A, READ_B, WRITE, FREED, DONE, STALL };

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  Reader in(argv[1]);
  const int64_t word_bytes = in.number();
  const int64_t columns = in.number();
  const int64_t half_rows = in.number();
  const int64_t fault = in.number();
  const int64_t limit = in.number();
  std::vector<uint8_t> memory(static_cast<size_t>(in.number()));
  in.bytes(memory.data(), memory.size());
  std::vector<Instruction> program(static_cast<size_t>(in.number()));
  for (auto& item : program) {
    item.hold = in.number();
    in.bytes(item.word, sizeof item.word);
  }
  std::vector<Poke> pokes(static_cast<size_t>(in.number()));
  for (auto& poke : pokes) {
    poke.instruction = in.number();
    poke.address = in.number();
    poke.bytes.resize(static_cast<size_t>(in.number()));
    in.bytes(poke.bytes.data(), poke.bytes.size());
  }
  std::vector<uint8_t> refused(static_cast<size_t>(in.number()));
  in.bytes(refused.data(), refused.size());
  const size_t blocks = static_cast<size_t>(in.number());
  std::vector<int64_t> gap(blocks);
  std::vector<size_t> of_half[2];
  for (size_t k = 0; k < blocks; k++) {
    of_half[in.number()].push_back(k);
    gap[k] = in.number();
  }
  const size_t row_words = static_cast<size_t>(columns);
  std::vector<uint32_t> rows(blocks * static_cast<size_t>(half_rows) * row_words);
  in.bytes(rows.data(), rows.size() * 4);

  std::vector<Event> trace;
  std::ofstream dump(argv[3], std::ios::binary);
  VerilatedContext context;
  Vbench top(&context);
  const auto clock = [&] {
    top.clk = 1;
    top.eval();
    top.clk = 0;
    top.eval();
  };
  top.fault = static_cast<uint8_t>(fault);
  top.head_valid = 0;
  top.rst = 1;
  clock();
  clock();
  top.rst = 0;

  size_t next = 0, finished = 0;
  int64_t last_pop = -1;
  size_t place[2] = {0, 0};
  int64_t free_from[2] = {0, 0};
  std::vector<uint32_t> row(row_words);
  std::vector<uint8_t> word(static_cast<size_t>(word_bytes));
  for (int32_t t = 0; finished < program.size(); t++) {
    if (t >= limit) {
      trace.push_back({t, -1, 0, 0});
      break;
    }
    top.head_valid = next < program.size() && t >= last_pop + 1 + program[next].hold;
    if (top.head_valid) std::memcpy(&top.head, program[next].word, 64);
    bool full[2];
    for (int h = 0; h < 2; h++) {
      const bool any = place[h] < of_half[h].size();
      full[h] = any && t >= free_from[h] + gap[of_half[h][place[h]]];
    }
    top.half_full = static_cast<uint8_t>(full[0] | full[1] << 1);
    const uint8_t no = refused[static_cast<size_t>(t) % refused.size()];
    top.eval();
    top.a_granted = top.a_valid && !(no & 1);
    top.b_granted = top.b_valid && !(no & 2);
    top.w_granted = top.w_valid && !(no & 4);
    const int half = top.m_half;
    // What is not full shows something else than the row, so that reading it is noticed.
    for (auto& value : row) value = 0xdeadbeef;
    if (place[half] < of_half[half].size()) {
      const size_t block = of_half[half][place[half]];
      const size_t line = block * static_cast<size_t>(half_rows) + top.m_row;
      const uint32_t* from = &rows[line * row_words];
      for (size_t i = 0; i < row_words; i++) row[i] = full[half] ? from[i] : ~from[i];
    }
    std::memcpy(&top.m_data, row.data(), row.size() * 4);
    top.eval();

    if (top.pop) trace.push_back({t, POP, static_cast<int32_t>(next), 1});
    const auto request = [&](int32_t kind, int32_t where, bool granted) {
      trace.push_back({t, kind, where, granted});
    };
    if (top.a_valid) request(READ_A, static_cast<int32_t>(top.a_address), top.a_granted);
    if (top.b_valid) request(READ_B, static_cast<int32_t>(top.b_address), top.b_granted);
    if (top.w_valid) request(WRITE, static_cast<int32_t>(top.w_address), top.w_granted);
    for (int h = 0; h < 2; h++)
      if (top.half_freed >> h & 1) trace.push_back({t, FREED, h, 1});
    if (top.accumulator_stall) trace.push_back({t, STALL, 0, 1});
    if (top.done) trace.push_back({t, DONE, static_cast<int32_t>(top.done_signals), 1});
    if ((top.a_valid && top.a_write) || (top.b_valid && top.b_write) ||
        (top.w_valid && !top.w_write) || top.idle != (next == finished))
      trace.push_back({t, -2, 0, 0});

    const bool popped = top.pop, done = top.done;
    const bool granted[2] = {static_cast<bool>(top.a_granted), static_cast<bool>(top.b_granted)};
    const int64_t address[2] = {top.a_address, top.b_address};
    for (int h = 0; h < 2; h++) {
      if (!(top.half_freed >> h & 1)) continue;
      place[h]++;
      free_from[h] = t + 1;
    }
    std::vector<uint8_t> data[2];
    for (int p = 0; p < 2; p++) {
      data[p].assign(static_cast<size_t>(word_bytes), static_cast<uint8_t>(0x5a + t));
      if (!granted[p]) continue;
      if ((address[p] + 1) * word_bytes > static_cast<int64_t>(memory.size()))
        trace.push_back({t, -3, p, 0});
      else
        std::memcpy(data[p].data(), &memory[static_cast<size_t>(address[p] * word_bytes)],
                    static_cast<size_t>(word_bytes));
    }
    if (top.w_granted) {
      std::memcpy(word.data(), &top.w_data, word.size());
      std::vector<uint8_t> mask((word.size() + 7) / 8);
      std::memcpy(mask.data(), &top.w_mask, mask.size());
      for (size_t i = 0; i < word.size(); i++) {
        const size_t at = static_cast<size_t>(top.w_address) * word.size() + i;
        if ((mask[i / 8] >> (i % 8) & 1) == 0) continue;
        if (at < memory.size()) memory[at] = word[i];
        else trace.push_back({t, -3, 2, 0});
      }
    }
    top.clk = 1;
    top.eval();
    top.clk = 0;
    std::memcpy(&top.a_data, data[0].data(), data[0].size());
    std::memcpy(&top.b_data, data[1].data(), data[1].size());
    if (popped) {
      for (const auto& poke : pokes)
        if (poke.instruction == static_cast<int64_t>(next))
          std::memcpy(&memory[static_cast<size_t>(poke.address)], poke.bytes.data(),
                      poke.bytes.size());
      last_pop = t;
      next++;
    }
    if (done) {
      finished++;
      dump.write(reinterpret_cast<const char*>(memory.data()),
                 static_cast<std::streamsize>(memory.size()));
    }
  }
  std::ofstream out(argv[2], std::ios::binary);
  out.write(reinterpret_cast<const char*>(trace.data()),
            static_cast<std::streamsize>(trace.size() * sizeof(Event)));
  top.final();
  return 0;
}
