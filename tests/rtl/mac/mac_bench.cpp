// Drives tw_mac with the jobs of standard input and logs what it does, cycle by cycle.
//
// A job, line by line (until `run`):
//   sram FILE             the memory's content
//   grants ACT WGT        plans of '0' and '1', one character a cycle, repeated
//   offers PLAN           whether the head of the queue is shown in a cycle
//   drains N N ...        cycles each filled half stays full, in the order of filling, repeated
//   fault N
//   preload HALF ROW HEX  N accumulators, column 0 first
//   instruction HEX KEEP  KEEP = 1: show both halves when it has ended
//   rows N                rows of a half shown
//   run LIMIT             runs until all have ended and no half is full, at most LIMIT cycles
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "Vmac_bench.h"
#include "Vmac_bench___024root.h"
#include "verilated.h"

#ifndef TW_W
#error "TW_W: bytes of an SRAM word; TW_N: columns"
#endif

static const std::string ON = "1";

struct Job {
  std::vector<uint8_t> sram;
  std::string grants[2] = {ON, ON};
  std::string offers = ON;
  std::vector<int> drains{0};
  int fault = 0;
  std::vector<std::string> preloads;
  std::vector<std::string> words;
  std::vector<bool> keep;
  int rows = 1;
};

template <size_t Words>
static uint32_t* words(VlWide<Words>& port) { return port.data(); }
static uint32_t* words(QData& port) { return reinterpret_cast<uint32_t*>(&port); }
static uint32_t* words(IData& port) { return &port; }

static bool bit(const std::string& plan, uint64_t cycle) {
  return plan[cycle % plan.size()] == '1';
}

class Run {
 public:
  Run(Vmac_bench& top, const Job& job) : top_(top), job_(job) {}

  void reset() {
    top_.fault = job_.fault;
    top_.head_valid = 0;
    top_.half_freed = 0;
    top_.act_granted = top_.wgt_granted = 0;
    top_.rst = 1;
    for (int cycle = 0; cycle < 3; cycle++) clock();
    top_.rst = 0;
    for (const std::string& text : job_.preloads) preload(text);
  }

  // Returns whether everything ended within the limit.
  bool run(uint64_t limit) {
    size_t popped = 0, ended = 0;
    bool show = false;
    int left[2] = {-1, -1};
    size_t drained = 0;
    bool seen_full[2] = {false, false};
    uint32_t read[2] = {0, 0};
    bool reads[2] = {false, false};
    for (uint64_t cycle = 0; cycle < limit; cycle++) {
      data(words(top_.act_data), reads[0], read[0]);
      data(words(top_.wgt_data), reads[1], read[1]);
      top_.head_valid = popped < job_.words.size() && bit(job_.offers, cycle);
      if (popped < job_.words.size()) head(job_.words[popped]);
      top_.act_granted = top_.wgt_granted = 0;
      top_.half_freed = 0;
      top_.eval();
      if (show) {
        dump(cycle, "kept", 0);
        dump(cycle, "kept", 1);
        show = false;
      }
      if (ended == job_.words.size() && !top_.half_full) return true;
      for (int half = 0; half < 2; half++) {
        const bool full = top_.half_full >> half & 1;
        if (full && !seen_full[half]) {
          left[half] = job_.drains[drained++ % job_.drains.size()];
          dump(cycle, "full", half);
        }
        seen_full[half] = full;
        if (full && left[half]-- == 0) top_.half_freed |= 1 << half;
      }
      // What the vector unit reads must not matter to the array.
      top_.m_half = cycle >> 1 & 1;
      top_.m_row = cycle % job_.rows;
      reads[0] = top_.act_granted = top_.act_valid && bit(job_.grants[0], cycle);
      reads[1] = top_.wgt_granted = top_.wgt_valid && bit(job_.grants[1], cycle);
      read[0] = top_.act_address;
      read[1] = top_.wgt_address;
      top_.eval();
      const unsigned long long now = cycle;
      if (top_.differs) std::printf("%llu differs\n", now);
      if (top_.writes) std::printf("%llu writes\n", now);
      if (top_.pop) {
        std::printf("%llu pop\n", now);
        popped++;
      }
      if (reads[0]) std::printf("%llu act %x\n", now, read[0]);
      if (reads[1]) std::printf("%llu wgt %x\n", now, read[1]);
      if (top_.accumulator_stall) std::printf("%llu stall\n", now);
      if (top_.done) {
        std::printf("%llu done %x\n", now, top_.done_signals);
        show = job_.keep[ended++];
      }
      clock();
    }
    return false;
  }

 private:
  Vmac_bench& top_;
  const Job& job_;

  void clock() {
    top_.clk = 1;
    top_.eval();
    top_.clk = 0;
    top_.eval();
  }

  void data(uint32_t* port, bool valid, uint32_t word) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(port);
    // Nothing may use the port without a grant in the cycle before.
    for (int i = 0; i < TW_W; i++) bytes[i] = valid ? job_.sram.at(word * TW_W + i) : 0xd5;
  }

  void head(const std::string& hex) {
    for (int i = 0; i < 16; i++) {
      top_.head[i] = std::strtoul(hex.substr(8 * (15 - i), 8).c_str(), nullptr, 16);
    }
  }

  void preload(const std::string& text) {
    std::istringstream in(text);
    int half, row;
    std::string hex;
    in >> half >> row >> hex;
    const size_t index = half * (TW_REGISTERS / 2) + row;
    for (int c = 0; c < TW_N; c++) {
      const uint32_t value = std::strtoul(hex.substr(8 * c, 8).c_str(), nullptr, 16);
      top_.rootp->mac_bench__DOT__g_form__BRA__0__KET____DOT__mac__DOT__registers__DOT__m_q[index][c] =
          value;
#ifdef TW_PAIR
      top_.rootp->mac_bench__DOT__g_form__BRA__1__KET____DOT__mac__DOT__registers__DOT__m_q[index][c] =
          value;
#endif
    }
  }

  void dump(uint64_t cycle, const char* what, int half) {
    std::printf("%llu %s %d", (unsigned long long)cycle, what, half);
    for (int row = 0; row < job_.rows; row++) {
      top_.m_half = half;
      top_.m_row = row;
      top_.eval();
      if (top_.differs) std::printf(" differs");
      std::printf(" ");
      for (int c = 0; c < TW_N; c++) std::printf("%08x", words(top_.m_data)[c]);
    }
    std::printf("\n");
  }
};

int main() {
  Vmac_bench top;
  Job job;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    std::string word;
    in >> word;
    if (word == "sram") {
      std::string name;
      in >> name;
      std::ifstream file(name, std::ios::binary);
      job.sram.assign(std::istreambuf_iterator<char>(file), {});
    } else if (word == "grants") {
      in >> job.grants[0] >> job.grants[1];
    } else if (word == "offers") {
      in >> job.offers;
    } else if (word == "drains") {
      job.drains.clear();
      for (int n; in >> n;) job.drains.push_back(n);
    } else if (word == "fault") {
      in >> job.fault;
    } else if (word == "preload") {
      job.preloads.push_back(line.substr(8));
    } else if (word == "rows") {
      in >> job.rows;
    } else if (word == "instruction") {
      std::string hex;
      bool keep;
      in >> hex >> keep;
      job.words.push_back(hex);
      job.keep.push_back(keep);
    } else if (word == "run") {
      uint64_t limit;
      in >> limit;
      Run run(top, job);
      run.reset();
      std::printf(run.run(limit) ? "ended\n" : "limit\n");
      job = Job();
    } else {
      std::fprintf(stderr, "unknown line: %s\n", line.c_str());
      return 2;
    }
  }
  return 0;
}
