// A CTA as the emulator's own files see it: its threads, what they wait for, and what of theirs is under way.
#pragma once

#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

namespace cake::emulator {

struct Copy {
  void* to;
  const void* from;  // null: zeros
  uint32_t bytes;

  void run() const {
    if (from) std::memcpy(to, from, bytes);
    else std::memset(to, 0, bytes);
  }
};

// Copies of one thread, in its order: numbered from the first that the thread started.
struct Copies {
  std::deque<Copy> open;
  std::deque<uint64_t> groups;  // for each that is committed and not waited for: the number behind its last copy
  uint64_t landed = 0;

  uint64_t started() const { return landed + open.size(); }
  void commit() { groups.push_back(started()); }
  void land(uint64_t end) {
    for (; landed < end; ++landed, open.pop_front()) open.front().run();
  }
  void wait(size_t pending) {
    for (; groups.size() > pending; groups.pop_front()) land(groups.front());
  }
};

// What ends a wait changes a counter: a fiber is ready as soon as its counter isn't what it saw.
struct Wait {
  enum Kind { kNone, kMbarrier, kNamed, kWarp } kind = kNone;
  uint32_t which = 0;
  const uint64_t* counter = nullptr;
  uint64_t seen = 0;

  bool over() const { return kind == kNone || *counter != seen; }
};

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool begun = false, done = false;
  Wait wait;
  Copies loads, stores;  // cp.async; bulk stores
};

struct Mbarrier {
  int count = 0, missing = 0;
  int64_t bytes = 0;  // announced and not landed
  uint64_t phase = 0;
};

struct Product {
  float* d[32];
  uint32_t a[32][4];
  uint64_t a_descriptor, b_descriptor;
  int n;
  bool a_in_registers, a_transposed, b_transposed, accumulate;
};

struct Warp {
  const char* operation = nullptr;  // that lanes have come to
  void* operands[32];
  int arrived = 0;
  uint64_t turn = 0;
  std::deque<Product> products;
  std::deque<size_t> groups;  // products in each that is committed and not waited for
  size_t uncommitted = 0;
};

// A bulk load; or, of a thread's loads, the arrival that is due when those before `end` have landed.
struct Event {
  std::vector<Copy> copies;
  uint32_t bar;
  int thread;  // -1: a bulk load
  uint64_t end;
};

extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern std::vector<Event> events;
extern int current;  // the thread whose fiber runs, or -1

bool chance(int of);  // true one time in `of`, and only of schedules at random
inline int warp_of(int thread) { return thread / 32; }
void fail(const std::string& text);  // ends the launch: what is left of it doesn't run
std::string place(uint32_t address);
void wait_for(Wait::Kind kind, uint32_t which, const uint64_t& counter);
Mbarrier& mbarrier(uint32_t bar);
void complete(uint32_t bar, int arrivals, int64_t bytes);
void land(size_t index);  // one of the events

}  // namespace cake::emulator
