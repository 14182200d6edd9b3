// SPDX-License-Identifier: MIT
#include <lamina/codec.hpp>
#include <lamina/collectives/torch_hooks.hpp>
#include <lamina/worker.hpp>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "loops/streaming.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;

class streaming_worker {
 public:
  streaming_worker(worker_link& server, replica& local, const worker_tasks& tasks,
                   const worker_options& options, const streaming_options& streaming)
      : server_(server),
        local_(local),
        tasks_(tasks),
        plan_(options.plan),
        streaming_(streaming),
        parameters_(local.network().ptr()->parameters()),
        compressor_(std::make_shared<lamina::gradient_compressor<float>>(local.partition().model(),
                                                                         options.compression)),
        arrived_(local.model()),
        hooks_(*local.network().ptr(), [this](std::size_t l) { gradient_is_ready(l); }) {
    if (has_gates()) collectives::set_gates(*local.network().ptr(), [this](std::size_t l) { wait_for(l); });
  }
  streaming_worker(const streaming_worker&) = delete;
  streaming_worker& operator=(const streaming_worker&) = delete;
  ~streaming_worker() {
    if (has_gates()) collectives::set_gates(*local_.network().ptr(), {});
  }

  void run() {
    if (plan_.steps_done > 0) load_state(server_.receive_states(1)[0], compressor_.get(), tasks_);
    arriving_ = plan_.steps_done + 1;
    for (std::uint64_t step = arriving_;; ++step) {
      if (step == plan_.steps_done + 1 || !has_gates() || must_be_whole_before(step)) take_all(step);
      step_report report = examine(local_, step, plan_, tasks_, server_.clock(),
                                   [&](std::span<double> statistics) { server_.average(statistics); });
      if (plan_.is_over(step)) return server_.finish(report);
      compute(step, report);
      send_rest(report);
      if (!plan_.makes_checkpoint_after(step)) continue;
      if (streaming_.is_in_parts) take_all(step + 1);  // and with them the step is committed
      server_.send_states({{save_state(compressor_.get(), tasks_)}});
    }
  }

 private:
  bool has_gates() const { return streaming_.is_in_parts && streaming_.reaches_forward; }
  bool must_be_whole_before(std::uint64_t step) const {
    return plan_.is_over(step) || plan_.compares_replicas_before(step) ||
           plan_.averages_statistics_before(step) || plan_.makes_checkpoint_after(step - 1);
  }

  // Forward, whose gates wait for parameters of this step, and backward, whose hooks hand gradients over.
  void compute(std::uint64_t step, step_report& report) {
    computing_ = step;
    has_begun_ = false;
    server_.clock().take();
    tasks_.compute(step, report);
    hooks_.check_all_called();
  }

  void gradient_is_ready(std::size_t layer) {
    // The step before is committed when all parameters of this one are there, and only then its residual may be written.
    if (!has_begun_) take_all(computing_);
    has_begun_ = true;
    compressor_->accumulate(layer, parameters_[layer].grad());
    if (!streaming_.is_in_parts) return;
    const lamina::partition& cut = local_.partition();
    for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
      if (compressor_->is_sent(p)) ready_bytes_ += cut.parts().sizes()[p] * sizeof(float);
    }
    if (ready_bytes_ > 0 && ready_bytes_ >= streaming_.part_bytes) {
      server_.begin_send(message_kind::part, {compressor_->encode_ready().segments(), compressor_});
      ready_bytes_ = 0;
    }
    while (const std::optional<message> part = server_.look_for(message_kind::parameters)) take(*part);
  }

  void send_rest(step_report report) {
    ready_bytes_ = 0;
    const lamina::encoded_frame& frame =
        streaming_.is_in_parts ? compressor_->encode_rest() : compressor_->encode();
    report.threshold = compressor_->threshold();
    if (streaming_.is_in_parts) {
      server_.begin_push(report, {frame.segments(), compressor_});
      is_to_be_committed_ = true;
    } else {
      server_.push(report, {frame.segments(), compressor_});
      compressor_->commit();
    }
  }

  // A frame of parameters, or a part of them.
  void take(const message& parameters) {
    read_from(server_.name_of_server(), [&] {
      const auto frame = lamina::decode<float>(parameters.bytes, local_.model());
      lamina::expect_part(frame, lamina::frame_kind::parameters, arriving_);
      arrived_.add(frame);
      for (std::size_t l = 0; l < local_.model().layers(); ++l) frame.apply_to(l, local_[l]);
      return 0;
    });
    if (!arrived_.is_complete()) return;
    arrived_.next_step();
    ++arriving_;
    local_.upload();
    // The server has all of this worker's step, so nothing of it is on its way any more.
    if (!std::exchange(is_to_be_committed_, false)) return;
    server_.flush();
    compressor_->commit();
  }

  // Returns when all parameters that `step` begins with are there.
  void take_all(std::uint64_t step) {
    while (arriving_ <= step) take(server_.receive(message_kind::parameters));
  }

  // At the gate of a layer.
  void wait_for(std::size_t layer) {
    const lamina::partition& cut = local_.partition();
    for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
      while (arriving_ <= computing_ && !arrived_.is_decided(p))
        take(server_.receive(message_kind::parameters));
    }
  }

  worker_link& server_;
  replica& local_;
  const worker_tasks& tasks_;
  const training_plan& plan_;
  const streaming_options& streaming_;
  std::vector<torch::Tensor> parameters_;  // of the network
  // Shared with the frames on their way, which lie in its residual.
  std::shared_ptr<lamina::gradient_compressor<float>> compressor_;
  lamina::step_parts arrived_;       // of the parameters that step `arriving_` begins with
  std::uint64_t arriving_ = 0;       // all of those before are there
  std::uint64_t computing_ = 0;      // the step
  bool has_begun_ = false;           // a gradient of it is there
  bool is_to_be_committed_ = false;  // the step before
  std::size_t ready_bytes_ = 0;      // of layers that are to be sent, since the last part
  collectives::gradient_hooks hooks_;
};

}  // namespace

void work_as_ready(worker_link& server, replica& local, const worker_tasks& tasks,
                   const worker_options& options, const streaming_options& streaming) {
  streaming_worker(server, local, tasks, options, streaming).run();
}

}  // namespace lab
