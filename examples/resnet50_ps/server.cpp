// SPDX-License-Identifier: MIT
// What rank 0 does: holds the parameters, takes gradients, and sends each leader the fragments that it has not seen.
#include <lamina/lamina.hpp>
#include <optional>

#include "checkpoint.hpp"
#include "training.hpp"

namespace {

class parameter_server {
 public:
  explicit parameter_server(const run& of)
      : of_(of),
        network_((torch::manual_seed(of.with.seed), of.data.train->classes())),
        parameters_(network_.parameters()),
        cut_(lamina::layout_of(network_), of.with.fragment),
        fragments_(fragments_of(parameters_, of.with.fragment)),
        sgd_(fragments_, torch::optim::SGDOptions(0).momentum(of.with.momentum)),
        down_bytes_(of.who.leaders.size()),
        done_(load()),
        server_(cut_.model(), server_options()),
        log_(of.title, of.directory, of.with.steps, done_, of.who.workers, cut_.model().elements()) {
    for (const torch::Tensor& each : fragments_) memory_.push_back(torch::empty_like(each));
    std::printf("  %zu elements in %zu fragments of up to %zu; a step sends %g %% and less than a fragment more\n", cut_.model().elements(),
                cut_.fragments().layers(), std::ranges::max(cut_.fragments().sizes()),
                of.drop_ratio == 1 ? 100 : 100 * (1 - of.drop_ratio));  // at R = 1, Algorithm 1 finds no threshold
  }

  records serve() {
    of_.with.async ? serve_asynchronously() : serve_in_step();
    report last = {.checksum = checksum_of(parameters_)};
    add_reports(last, of_.who.all_workers, of_.who);
    log_.finish(last);
    return std::move(log_);
  }

 private:
  lamina::server_options server_options() const {
    std::vector<std::size_t> workers_of_sender;
    for (const auto& node : of_.who.nodes) workers_of_sender.push_back(node.size());
    return {.nodes = workers_of_sender, .asynchronous = of_.with.async, .fragment_elements = of_.with.fragment, .first_step = done_ + 1};
  }

  // Waits for all, applies the mean, sends all of them the same frame.
  void serve_in_step() {
    for (std::uint64_t step = done_ + 1;; ++step) {
      reply_to_all();
      if (step > of_.with.steps) return;

      add_reports(record_.told, of_.who.all_workers, of_.who);
      if (of_.agrees()) agree();
      for (std::size_t s = 0; s < senders(); ++s) take(s);
      apply(of_.rate(step));
      finish_step(step);
      if (of_.saves_after(step)) save(step);
    }
  }

  // Applies each frame when it comes, and replies to its sender alone.
  void serve_asynchronously() {
    for (std::size_t s = 0; s < senders(); ++s) reply(s);
    std::vector<std::uint64_t> done(senders(), 0);
    std::vector<bool> is_due(senders(), false);  // a reply that --staleness delays
    for (std::uint64_t applied = 0; applied < of_.with.steps * senders();) {
      const std::size_t s = next_sender();
      take(s);
      add_reports(record_.told, of_.who.nodes[s], of_.who);
      apply(of_.rate(applied / senders() + 1));
      if (++applied % senders() == 0) finish_step(applied / senders());

      is_due[s] = ++done[s] < of_.with.steps;
      waits_since_[s] = clock_type::time_point::max();
      for (std::size_t other = 0; other < senders(); ++other) {
        if (!is_due[other] || done[other] - *std::ranges::min_element(done) > of_.with.staleness) continue;
        reply(other);
        is_due[other] = false;
      }
    }
    for (std::size_t s = 0; s < senders(); ++s) reply(s);  // what all have led to
  }

  // All have seen the same, and so get the same frame, at the same time.
  void reply_to_all() {
    std::optional<lamina::server_reply> news;
    for (std::size_t s = 0; s < senders(); ++s) news = server_.reply(s, parameters_);
    of_.who.send(news->frame(), of_.who.leaders, parameters_tag);
    for (std::size_t s = 0; s < senders(); ++s) server_.commit(s, news->clock());
    std::ranges::fill(down_bytes_, news->size_bytes());
  }
  // What this sender has not seen yet: the whole model at first.
  void reply(std::size_t s) {
    const auto news = server_.reply(s, parameters_);
    of_.who.send(news.frame(), of_.who.leaders[s], parameters_tag);
    server_.commit(s, news.clock());
    down_bytes_[s] = news.size_bytes();
    waits_since_[s] = clock_type::now();
  }

  // Of which sender a frame has come. Throws where one has been silent for too long, whatever the others send.
  std::size_t next_sender() {
    for (;;) {
      const auto longest = std::ranges::min_element(waits_since_) - waits_since_.begin();
      const int leader = of_.who.leaders[static_cast<std::size_t>(longest)];
      const auto since = clock_type::now() - waits_since_[static_cast<std::size_t>(longest)];
      const bool is_over = since >= of_.who.patience;  // then only this one is looked for
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(of_.who.patience - since);
      try {
        return of_.who.sender(lamina::mpi::wait_for_message(is_over ? leader : MPI_ANY_SOURCE, gradients_tag, MPI_COMM_WORLD, left));
      } catch (const lamina::mpi::timeout_error&) {
        if (is_over) throw;
      }
    }
  }

  // The mean of the leaders' values, the same for all of them.
  void agree() {
    std::vector<double> sum(cut_.fragments().layers()), own(sum.size());
    for (const int leader : of_.who.leaders) {
      const auto bytes = of_.who.receive(leader, values_tag);
      std::memcpy(own.data(), bytes.data(), bytes.size());
      for (std::size_t f = 0; f < sum.size(); ++f) sum[f] += own[f] / of_.who.workers;
    }
    of_.who.send(std::as_bytes(std::span(sum)), of_.who.leaders, agreed_tag);
  }

  void take(std::size_t s) {
    auto frame = of_.who.receive(of_.who.leaders[s], gradients_tag);
    record_.up_bytes += static_cast<double>(frame.size()) / static_cast<double>(senders());
    record_.down_bytes += static_cast<double>(down_bytes_[s]) / static_cast<double>(senders());
    const auto begin = clock_type::now();
    if (const auto error = server_.add(std::move(frame)))
      throw std::runtime_error("a frame of " + name_of(of_.who.leaders[s]) + ": " + error.message());
    record_.server_seconds += seconds_since(begin);
  }

  void apply(double rate) {
    const auto begin = clock_type::now();
    std::vector<torch::Tensor> means(memory_.size());  // undefined where nothing has arrived: no gradient, no update
    server_.update([&](std::size_t layer, std::size_t first, std::span<const float> mean) {
      const std::size_t f = cut_.first(layer) + (of_.with.fragment == 0 ? 0 : first / of_.with.fragment);
      means[f] = memory_[f];
      std::ranges::copy(mean, memory_[f].data_ptr<float>() + (first - cut_.begin(f)));
    });
    update(sgd_, means, rate);
    record_.server_seconds += seconds_since(begin);
  }

  void finish_step(std::uint64_t step) {
    record_.step = step;
    record_.seconds = seconds_since(begin_);
    log_.add(record_);
    begin_ = clock_type::now();
    record_ = {};
  }

  std::size_t senders() const { return of_.who.leaders.size(); }
  std::string file() const { return of_.directory + "/checkpoint.pt"; }
  std::string options() const {  // that a run which goes on must share
    return of_.with.data + ", batch " + std::to_string(of_.with.batch) + ", seed " + std::to_string(of_.with.seed) + ", " +
           std::to_string(of_.who.workers) + " workers";
  }

  void save(std::uint64_t step) {
    torch::serialize::OutputArchive archive, optimizer;
    archive.write("parameters", c10::IValue(parameters_));
    sgd_.save(optimizer);
    archive.write("optimizer", optimizer);
    archive.write("step", c10::IValue(static_cast<std::int64_t>(step)));
    archive.write("options", c10::IValue(options()));
    for (const int worker : of_.who.all_workers)
      archive.write("worker" + std::to_string(worker), tensor_of(of_.who.receive(worker, state_tag)));
    std::ostringstream stream;
    archive.save_to(stream);
    replace_file(file(), std::move(stream).str());
    begin_ = clock_type::now();
  }

  // Goes on from the checkpoint, if --resume says so and there is one, and gives each worker its part. Returns the steps done.
  std::uint64_t load() try {
    const bool is_there = of_.with.resume && std::filesystem::exists(file());
    torch::serialize::InputArchive archive, optimizer;
    c10::IValue step(std::int64_t{0}), made_with, parameters;
    if (is_there) {
      archive.load_from(file());
      archive.read("options", made_with);
      if (made_with.toStringRef() != options())
        throw std::runtime_error("made with " + made_with.toStringRef() + "; this run has " + options());
      archive.read("step", step);
      archive.read("parameters", parameters);
      for (std::size_t l = 0; l < parameters_.size(); ++l) parameters_[l].detach().copy_(parameters.toTensorVector().at(l));
      archive.read("optimizer", optimizer);
      sgd_.load(optimizer);
    }
    for (const int worker : of_.who.all_workers) {
      torch::Tensor state = torch::empty({0}, torch::kByte);
      if (is_there) archive.read("worker" + std::to_string(worker), state);
      of_.who.send(bytes_of(state), worker, state_tag);
    }
    return static_cast<std::uint64_t>(step.toInt());
  } catch (const std::exception& error) {  // of which torch's have a page of addresses after the sentence
    const std::string sentence = error.what();
    throw std::runtime_error(file() + ": " + sentence.substr(0, sentence.find('\n')));
  }

  const run& of_;
  resnet50 network_;
  std::vector<torch::Tensor> parameters_;
  lamina::tiling cut_;
  std::vector<torch::Tensor> fragments_;  // of the parameters, whose memory they share
  torch::optim::SGD sgd_;
  std::vector<std::size_t> down_bytes_;  // of the last reply to each sender
  std::uint64_t done_;
  lamina::server<float> server_;
  records log_;
  std::vector<torch::Tensor> memory_;                                                                       // of the mean gradients
  std::vector<clock_type::time_point> waits_since_{of_.who.leaders.size(), clock_type::time_point::max()};  // for each sender
  step_record record_;                                                                                      // of the step under way
  clock_type::time_point begin_ = clock_type::now();
};

}  // namespace

records serve(const run& of) { return parameter_server(of).serve(); }
