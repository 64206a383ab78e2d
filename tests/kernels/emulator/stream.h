// SPDX-License-Identifier: Apache-2.0
// Runs kernels in the order of their launches. CTAs that are on the device together have a thread
// of the CPU each, and hand a baton to each other: one runs at a time. A kernel that may begin
// early does so when all CTAs of the one before let it or have ended.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "scheduler.h"

namespace hopper {

struct Launch {
  Dim3 grid;
  int threads;
  uint32_t smem_bytes;
  std::function<void()> body;
  uint64_t seed;
  int resident;  // so many CTAs are there together
  bool early;    // it may begin before the one before has ended
};

class Stream {
 public:
  void launch(Launch launch) { kernels_.emplace_back(std::move(launch)); }

  // Until all kernels have ended. Throws std::runtime_error for a mistake of one.
  void synchronize() {
    idle_spins = 0;
    if (kernels_.empty()) return;
    random_ = Random(kernels_.front().launch.seed + 1);
    start_kernels();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      turn_ = 0;
      changed_.notify_all();
      changed_.wait(lock, [&] { return turn_ == kNobody; });
    }
    for (auto& worker : workers_) worker->thread.join();
    const std::string error = std::move(error_);
    error_.clear();
    workers_.clear();
    kernels_.clear();
    if (!error.empty()) throw std::runtime_error(error);
  }

 private:
  static constexpr size_t kNobody = ~static_cast<size_t>(0);

  struct Kernel {
    explicit Kernel(Launch x) : launch(std::move(x)) {
      ctas = launch.grid.x * launch.grid.y * launch.grid.z;
    }
    Launch launch;
    unsigned ctas, begun = 0, ended = 0;
    bool is_started = false, is_over = false;
  };
  struct Worker {
    size_t kernel;
    Cta* cta = nullptr;
    bool is_running = true;
    std::thread thread;
  };

  bool may_start(size_t number) const {
    if (number == 0) return true;
    const Kernel& before = kernels_[number - 1];
    if (!kernels_[number].launch.early) {
      for (size_t i = 0; i < number; ++i)
        if (!kernels_[i].is_over) return false;
      return true;
    }
    if (!before.is_started || before.begun < before.ctas) return false;
    // With some seeds there is no room for it any earlier.
    if (kernels_[number].launch.seed % 4 == 0) return before.is_over;
    for (const auto& worker : workers_)
      if (worker->kernel == number - 1 && worker->cta != nullptr && !worker->cta->lets_next)
        return false;
    return true;
  }

  void start_kernels() {
    for (size_t i = 0; i < kernels_.size(); ++i) {
      Kernel& kernel = kernels_[i];
      if (kernel.is_started) continue;
      if (!may_start(i)) return;
      kernel.is_started = true;
      const unsigned most = kernel.launch.resident < 1 ? 1 : kernel.launch.resident;
      for (unsigned n = 0; n < min(most, kernel.ctas); ++n) {
        const size_t at = workers_.size();
        workers_.push_back(std::make_unique<Worker>());
        workers_[at]->kernel = i;
        workers_[at]->thread = std::thread([this, at] {
          wait_for_turn(at);
          work(*workers_[at], at);
          workers_[at]->is_running = false;
          if (error_.empty()) start_kernels();
          next_turn(at);
        });
      }
    }
  }

  void work(Worker& worker, size_t at) {
    Kernel& kernel = kernels_[worker.kernel];
    try {
      while (error_.empty() && kernel.begun < kernel.ctas) {
        const unsigned number = kernel.begun++;
        const Dim3& grid = kernel.launch.grid;
        Index index;
        index.x = number % grid.x;
        index.y = number / grid.x % grid.y;
        index.z = number / grid.x / grid.y;
        Cta one(index, grid, kernel.launch.threads, kernel.launch.smem_bytes,
                kernel.launch.seed + 7919 * number);
        if (kernel.launch.early && worker.kernel > 0)
          one.before_is_over = &kernels_[worker.kernel - 1].is_over;
        worker.cta = &one;
        one.run(kernel.launch.body, [&] { let_others(at); });
        worker.cta = nullptr;
        progress();
        if (++kernel.ended == kernel.ctas) end(worker.kernel);
      }
    } catch (const std::exception& e) {
      worker.cta = nullptr;
      if (error_.empty()) error_ = e.what();
    }
  }

  void end(size_t number) {
    kernels_[number].is_over = true;
    for (auto& worker : workers_)
      if (worker->kernel == number + 1 && worker->cta != nullptr) worker->cta->go_on();
  }

  void let_others(size_t at) {
    start_kernels();
    int64_t all = 0;
    bool can_any = false;
    for (const auto& worker : workers_) {
      if (!worker->is_running) continue;
      all += kernels_[worker->kernel].launch.threads;
      can_any |= worker->cta == nullptr || !worker->cta->is_behind();
    }
    if (!can_any || idle_spins > 2000 + 500 * all) {
      std::string what = "Threads wait for what nobody does.";
      for (const auto& worker : workers_)
        if (worker->cta != nullptr) what += worker->cta->waiting();
      throw std::runtime_error(what);
    }
    next_turn(at);
    wait_for_turn(at);
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  void wait_for_turn(size_t at) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return turn_ == at; });
  }

  // To one that can go on, another one if there is any.
  void next_turn(size_t at) {
    std::vector<size_t> others;
    bool can_go_on = false;
    for (size_t i = 0; i < workers_.size(); ++i) {
      const Worker& worker = *workers_[i];
      if (!worker.is_running) continue;
      if (error_.empty() && worker.cta != nullptr && worker.cta->is_behind()) continue;
      if (i == at)
        can_go_on = true;
      else
        others.push_back(i);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!others.empty())
      turn_ = others[random_.below(static_cast<uint32_t>(others.size()))];
    else
      turn_ = can_go_on ? at : kNobody;
    if (turn_ != at) changed_.notify_all();
  }

  std::deque<Kernel> kernels_;
  std::vector<std::unique_ptr<Worker>> workers_;
  Random random_{0};
  size_t turn_ = kNobody;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string error_;
};

// Runs a kernel, of whose CTAs so many are there together. Throws std::runtime_error for a mistake
// of the kernel.
template <typename Params>
void run_grid(Dim3 grid, int threads, uint32_t smem_bytes, void (*kernel)(Params),
              const Params& params, uint64_t seed, int resident = 1) {
  Stream stream;
  stream.launch({grid, threads, smem_bytes, [=] { kernel(params); }, seed, resident, false});
  stream.synchronize();
}

// For functions that Python calls: NULL, or what went wrong, until the next call.
template <typename Call>
const char* error_of(Call call) {
  static std::string kept;
  try {
    call();
    return nullptr;
  } catch (const std::exception& e) {
    kept = e.what();
    return kept.c_str();
  }
}

}  // namespace hopper
