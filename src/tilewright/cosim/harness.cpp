// Runs `tw_top`, built by Verilator, from Python through a C interface.
//
// The loop plays what lies outside the chip (memory at the `mem_` port, a host that loads registers
// and starts) and keeps the log that docs/concepts/microarchitecture.md names. It knows nothing of
// instructions: it counts starts and ends an engine, Python gives the counts their names.
//
// Built with -DTW_W (bytes of an SRAM word), -DTW_G (bytes of a DDR unit), -DTW_SRAM_WORDS, and
// -DTW_VCD or -DTW_FST when it writes traces.

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "Vtw_top.h"
#include "verilated.h"
#if defined(TW_VCD)
#include <fcntl.h>
#include <unistd.h>

#include "verilated_vcd_c.h"
using TraceFile = VerilatedVcdC;
#elif defined(TW_FST)
#include <sys/mman.h>
#include <sys/stat.h>

#include "verilated_fst_c.h"
using TraceFile = VerilatedFstC;
#endif
#if defined(TW_VCD) || defined(TW_FST)
#define TW_TRACE 1
#endif

namespace {

constexpr unsigned kEngines = 6;
constexpr unsigned kCounters = 49;
constexpr unsigned kInstructionBytes = 64;

// As in driver.py.
enum Status : int32_t {
  kRunning = 0, kFinished, kTrapped, kQuiet, kOutOfRange, kFatal, kTraceLost
};

#ifdef TW_VCD
// A file whose writer never fails: Verilator would throw from wherever it flushes, destructors
// among them. What went wrong first is kept, and what comes after is dropped.
struct Sink : VerilatedVcdFile {
  int fd = -1;
  int error = 0;

  bool open(const std::string& name) override {
    fd = ::open(name.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) error = errno;
    return fd >= 0;
  }
  void close() override {
    if (fd >= 0 && ::close(fd) != 0 && !error) error = errno;
    fd = -1;
  }
  ssize_t write(const char* data, ssize_t size) override {
    if (error) return size;
    const ssize_t written = ::write(fd, data, size);
    if (written >= 0 || errno == EINTR || errno == EAGAIN) return written;
    error = errno;
    return size;
  }
};
#endif
#ifdef TW_FST
// What went wrong with a file of the thread's FST writer, which looks at no result itself.
thread_local int fst_error = 0;
constexpr int kUnknown = -1;
#endif

// Verilator's signals are little-endian integers or arrays of 32-bit words, whatever their width.
template <typename T>
const uint8_t* bytes_of(const T& signal) {
  return reinterpret_cast<const uint8_t*>(&signal);
}
template <typename T>
uint8_t* bytes_of(T& signal) {
  return reinterpret_cast<uint8_t*>(&signal);
}

struct Sim {
  VerilatedContext context;
  std::unique_ptr<Vtw_top> top;
  std::vector<uint8_t> code;
  uint8_t* ddr = nullptr;
  uint64_t ddr_size = 0;

  uint64_t cycle = 0;
  uint64_t quiet = 0;
  std::vector<uint64_t> dispatch_cycle;
  std::vector<uint8_t> dispatch_engine;
  std::vector<uint64_t> start[kEngines];
  std::vector<uint64_t> done[kEngines];
  uint64_t fault_address = 0;
  uint32_t fault_kind = 0;  // 0 read, 1 write, 2 fetch
  std::string message;

#ifdef TW_VCD
  Sink sink;  // outlives `trace`
#endif
#ifdef TW_TRACE
  std::unique_ptr<TraceFile> trace;
  int32_t trace_error = 0;
  uint64_t trace_from = 0;
  uint64_t trace_until = 0;
  uint64_t core_mhz = 1;
#endif

  Sim() {
    context.randReset(0);
#ifdef TW_TRACE
    context.traceEverOn(true);
    context.timeunit(-12);
    context.timeprecision(-12);
#endif
    top.reset(new Vtw_top(&context, "TOP"));
  }

  // One clock edge outside the run: reset, registers.
  void edge() {
    top->clk = 0;
    top->eval();
    top->clk = 1;
    top->eval();
  }
};

// One access of the memory port; returns false when it leaves DDR. A unit may reach over the end of
// DDR as long as no byte beyond is written.
bool read_unit(const uint8_t* memory, uint64_t size, uint64_t address, uint8_t* unit) {
  if (address + TW_G <= size) {
    std::memcpy(unit, memory + address, TW_G);
    return true;
  }
  std::memset(unit, 0, TW_G);
  if (address >= size) return false;
  std::memcpy(unit, memory + address, size - address);
  return true;
}

bool write_unit(Sim& s, uint64_t address) {
  const uint8_t* data = bytes_of(s.top->mem_data);
  const uint8_t* mask = bytes_of(s.top->mem_mask);
  for (unsigned i = 0; i < TW_G; ++i) {
    if (!(mask[i / 8] >> (i % 8) & 1)) continue;
    if (address + i >= s.ddr_size) return false;
    s.ddr[address + i] = data[i];
  }
  return true;
}

#ifdef TW_TRACE
void rising_edge(Sim& s) { s.trace->dump(s.cycle * 1000000 / s.core_mhz); }
#endif

int32_t step(Sim& s, uint64_t cycles, uint64_t quiet_limit) {
  Vtw_top& top = *s.top;
  alignas(8) uint8_t unit[TW_G < 8 ? 8 : TW_G] = {};
  for (uint64_t n = 0; n < cycles; ++n) {
#ifdef TW_TRACE
    const bool traced = s.trace && s.cycle >= s.trace_from && s.cycle < s.trace_until;
    if (traced) {
      top.eval();
      rising_edge(s);
    }
#endif
#ifdef TW_VCD
    if (s.sink.error) return kTraceLost;
#endif
    // The falling edge moves no register; it settles what depends on the inputs of this cycle.
    top.clk = 0;
    top.eval();
#ifdef TW_TRACE
    if (traced) s.trace->dump((2 * s.cycle + 1) * 500000 / s.core_mhz);
#endif
    bool answered = false;
    if (top.mem_valid) {
      const uint64_t address = top.mem_address;
      bool good;
      if (top.mem_code) {
        good = !top.mem_write && read_unit(s.code.data(), s.code.size(), address, unit);
        answered = true;
      } else if (top.mem_write) {
        good = write_unit(s, address);
      } else {
        good = read_unit(s.ddr, s.ddr_size, address, unit);
        answered = true;
      }
      if (!good) {
        s.fault_address = address;
        s.fault_kind = top.mem_code ? 2 : top.mem_write;
        return kOutOfRange;
      }
    }
    if (top.dispatch_valid) {
      s.dispatch_cycle.push_back(s.cycle);
      s.dispatch_engine.push_back(top.dispatch_engine);
    }
    if (const unsigned moved = top.start | top.done) {
      for (unsigned e = 0; e < kEngines; ++e) {
        if (!(moved >> e & 1)) continue;
        if (top.start >> e & 1) s.start[e].push_back(s.cycle);
        if (top.done >> e & 1) s.done[e].push_back(s.cycle);
      }
    }
    if (top.trapped) return kTrapped;
    if (top.active) {
      s.quiet = 0;
    } else if (++s.quiet > quiet_limit) {
      return kQuiet;
    }
    const bool finished = top.finished;
    top.clk = 1;
    top.eval();
    ++s.cycle;
#ifdef TW_TRACE
    // A cycle is complete only with the edge that ends it.
    if (traced && (finished || s.cycle == s.trace_until)) rising_edge(s);
#endif
    if (finished) return kFinished;
    if (answered) std::memcpy(bytes_of(top.mem_read_data), unit, TW_G);
  }
  return kRunning;
}

}  // namespace

// Verilator's own endings would take Python with them.
void vl_finish(const char* file, int line, const char*) {
  throw std::runtime_error(std::string("$finish at ") + file + ":" + std::to_string(line));
}
void vl_stop(const char* file, int line, const char*) {
  throw std::runtime_error(std::string("$stop at ") + file + ":" + std::to_string(line));
}
void vl_fatal(const char* file, int line, const char*, const char* message) {
  throw std::runtime_error(std::string(message) + " at " + file + ":" + std::to_string(line));
}

#ifdef TW_FST
// The linker puts these in the place of what the FST writer calls (--wrap in build.py).
extern "C" {
int __real_fclose(FILE* file);
void* __real_mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset);

// A file that could not be written knows it until it is closed.
int __wrap_fclose(FILE* file) {
  errno = 0;
  const bool failed = std::fflush(file) != 0 || std::ferror(file);
  const int reason = errno ? errno : kUnknown;
  if (failed && !fst_error) fst_error = reason;
  return __real_fclose(file);
}

// Reading a file beyond its end, where it could not be written, would end the process.
void* __wrap_mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
  struct stat found;
  if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode) &&
      static_cast<uint64_t>(found.st_size) < static_cast<uint64_t>(offset) + size) {
    if (!fst_error) fst_error = kUnknown;
    return __real_mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  return __real_mmap(at, size, protection, flags, fd, offset);
}
void* __wrap_mmap64(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
  return __wrap_mmap(at, size, protection, flags, fd, offset);
}
}
#endif

#define TW_API extern "C" __attribute__((visibility("default")))

// Null when the model cannot be made.
TW_API Sim* tw_create() {
  try {
    return new Sim;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Closes the trace; 0 when all of it was written, else an `errno`, or -1 (`tw_message`). Says the
// same when asked again.
TW_API int32_t tw_trace_end(Sim* s) {
#ifdef TW_TRACE
  if (!s->trace) return s->trace_error;
  try {
    s->trace->close();
  } catch (const std::exception& error) {
    s->message = error.what();
    // Its destructor would close it again.
    (void)s->trace.release();
    return s->trace_error = -1;
  }
  s->trace.reset();
#if defined(TW_VCD)
  s->trace_error = s->sink.error;
#else
  s->trace_error = fst_error;
  if (fst_error == kUnknown) s->message = "not all of it could be written; is the disk full?";
#endif
  return s->trace_error;
#else
  (void)s;
  return 0;
#endif
}

TW_API void tw_destroy(Sim* s) {
  tw_trace_end(s);
  try {
    s->top->final();
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
  delete s;
}

namespace {

void load(Sim* s, const uint8_t* code, uint64_t instructions, const uint64_t* registers,
          uint32_t given, uint8_t* ddr, uint64_t ddr_size, uint8_t fault) {
  Vtw_top& top = *s->top;
  s->code.assign(code, code + instructions * kInstructionBytes);
  s->ddr = ddr;
  s->ddr_size = ddr_size;
  s->cycle = s->quiet = 0;
  s->dispatch_cycle.clear();
  s->dispatch_engine.clear();
  for (unsigned e = 0; e < kEngines; ++e) {
    s->start[e].clear();
    s->done[e].clear();
  }
  top.run = 0;
  top.config_write = 0;
  top.fault = fault;
  top.code_length = static_cast<uint32_t>(instructions);
  top.counter_select = 0;
  top.debug_address = 0;
  std::memset(bytes_of(top.mem_read_data), 0, TW_G);
  top.rst = 1;
  s->edge();
  s->edge();
  top.rst = 0;
  for (unsigned r = 0; r < 32; ++r) {
    if (!(given >> r & 1)) continue;
    top.config_write = 1;
    top.config_register = r;
    top.config_value = registers[r];
    s->edge();
  }
  top.config_write = 0;
  top.run = 1;
}

}  // namespace

// Resets the chip, loads code and registers; returns a Status. DDR stays the caller's and must
// outlive the run.
TW_API int32_t tw_load(Sim* s, const uint8_t* code, uint64_t instructions,
                       const uint64_t* registers, uint32_t given, uint8_t* ddr, uint64_t ddr_size,
                       uint8_t fault) {
  try {
    load(s, code, instructions, registers, given, ddr, ddr_size, fault);
    return kRunning;
  } catch (const std::exception& error) {
    s->message = error.what();
    return kFatal;
  }
}

// Writes the cycles [from, from + count) of the next runs to a file; results as of `tw_trace_end`.
TW_API int32_t tw_trace(Sim* s, const char* path, uint64_t from, uint64_t count, uint64_t mhz) {
#ifdef TW_TRACE
  try {
    errno = 0;
#if defined(TW_VCD)
    s->sink.error = 0;
    s->trace.reset(new TraceFile(&s->sink));
#else
    fst_error = 0;
    s->trace.reset(new TraceFile);
#endif
    s->top->trace(s->trace.get(), 99);
    s->trace->set_time_unit("1ps");
    s->trace->set_time_resolution("1ps");
    s->trace->open(path);
    s->trace_from = from;
    s->trace_until = from + count;
    s->core_mhz = mhz;
    if (s->trace->isOpen()) return 0;
    return errno ? errno : EIO;
  } catch (const std::exception& error) {
    s->message = error.what();
    return -1;
  }
#else
  (void)s, (void)path, (void)from, (void)count, (void)mhz;
  return ENOSYS;
#endif
}

// Runs at most `cycles` cycles more; returns a Status.
TW_API int32_t tw_run(Sim* s, uint64_t cycles, uint64_t quiet_limit) {
  try {
    return step(*s, cycles, quiet_limit);
  } catch (const std::exception& error) {
    s->message = error.what();
    return kFatal;
  }
}

TW_API const char* tw_message(Sim* s) { return s->message.c_str(); }
TW_API uint64_t tw_cycle(Sim* s) { return s->cycle; }
TW_API uint64_t tw_target_digest(Sim* s) { return s->top->target_digest; }
TW_API uint64_t tw_fault_address(Sim* s) { return s->fault_address; }
TW_API uint32_t tw_fault_kind(Sim* s) { return s->fault_kind; }

TW_API uint64_t tw_dispatched(Sim* s) { return s->dispatch_cycle.size(); }
TW_API const uint64_t* tw_dispatch_cycle(Sim* s) { return s->dispatch_cycle.data(); }
TW_API const uint8_t* tw_dispatch_engine(Sim* s) { return s->dispatch_engine.data(); }
TW_API uint64_t tw_starts(Sim* s, uint32_t e) { return s->start[e].size(); }
TW_API const uint64_t* tw_start_cycle(Sim* s, uint32_t e) { return s->start[e].data(); }
TW_API uint64_t tw_ends(Sim* s, uint32_t e) { return s->done[e].size(); }
TW_API const uint64_t* tw_done_cycle(Sim* s, uint32_t e) { return s->done[e].data(); }

// What the engines wait for, in the cycle the run stopped in: idle, queue not empty, waiting for a
// bank, DDR, accumulators; then the semaphores that are zero.
TW_API void tw_state(Sim* s, uint32_t* out) {
  Vtw_top& top = *s->top;
  out[0] = top.engine_idle;
  out[1] = top.queue_valid;
  out[2] = top.bank_stall;
  out[3] = top.ddr_stall;
  out[4] = top.accumulator_stall;
  out[5] = top.semaphore_zero;
}

// The chip's performance counters, by `counter_select`; returns kRunning or kFatal.
TW_API int32_t tw_counters(Sim* s, uint64_t* out) {
  try {
    for (unsigned i = 0; i < kCounters; ++i) {
      s->top->counter_select = i;
      s->top->eval();
      out[i] = s->top->counter_value;
    }
    return kRunning;
  } catch (const std::exception& error) {
    s->message = error.what();
    return kFatal;
  }
}

// All of SRAM, through the debug port; returns as `tw_counters`.
TW_API int32_t tw_sram(Sim* s, uint8_t* out) {
  try {
    for (uint32_t i = 0; i < TW_SRAM_WORDS; ++i) {
      s->top->debug_address = i;
      s->top->eval();
      std::memcpy(out + uint64_t{i} * TW_W, bytes_of(s->top->debug_data), TW_W);
    }
    return kRunning;
  } catch (const std::exception& error) {
    s->message = error.what();
    return kFatal;
  }
}
