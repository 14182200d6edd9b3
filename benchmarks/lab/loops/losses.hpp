// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <lamina/bounded/bounded.hpp>
#include <lamina/codec.hpp>
#include <lamina/error.hpp>
#include <lamina/server.hpp>
#include <lamina/slices.hpp>
#include <lamina/worker.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "loops/plan.hpp"
#include "messages/link.hpp"

/// Frames of which some may be lost: how they are cut, and what is sent again. In a run that loses nothing these cut nothing and
/// remember nothing.
namespace lab {

/// How frames of these parts are cut, for packets of so many bytes of data.
lamina::bounded::chunk_grid frame_grid(const lamina::layout& parts, lamina::payload_type payload,
                                       std::size_t packet_data_bytes);

/// Cuts the frames of one kind.
class frame_cutter {
 public:
  frame_cutter(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload);

  /// None if nothing can be lost. Points into the frame.
  std::optional<lamina::bounded::frame_chunks> cut(const lamina::encoded_frame& frame,
                                                   const lamina::selection& layers,
                                                   std::uint32_t bound_ppm) const;
  const std::optional<lamina::bounded::chunk_grid>& grid() const { return grid_; }

 private:
  bool has_tags_;
  std::optional<lamina::bounded::chunk_grid> grid_;
};

/// Frames of gradients, or of local updates, from one sender to one receiver: how each is cut, and what of it must arrive since it was
/// lost too often.
class frame_way {
 public:
  /// `parts` is the layout of the frames, and `payload` how they are written.
  frame_way(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload);

  /// Has `send(chunks, owed)` send the frame of `step`, `chunks` being nullptr where nothing can be lost, and remembers what was lost.
  template <class Send>
  sent_frame send(const lamina::encoded_frame& frame, const lamina::selection& parts, std::uint64_t step,
                  Send&& send) {
    const auto chunks = cutter_.cut(frame, parts, plan_.bound_up(step));
    std::vector<lamina::bounded::chunk> required;
    // What was lost is not in the residual where it is gone: others stand in its place.
    if (chunks && plan_.returns_lost) required = memory_->required(parts, plan_.max_losses);
    const lamina::bounded::obligations owed{.required = required};
    sent_frame sent = send(chunks ? &*chunks : nullptr, owed);
    if (sent.arrived && plan_.returns_lost) memory_->note(*sent.arrived);
    return sent;
  }

 private:
  loss_plan plan_;
  frame_cutter cutter_;
  std::optional<lamina::bounded::loss_memory> memory_;
};

/// A worker's gradients, or local updates, on their way to the server: what is lost of them stays in the residual, or in the drift, unless
/// the plan wants it gone.
class gradient_way {
 public:
  /// `parts` and `payload` are the compressor's.
  gradient_way(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload)
      : way_(plan, parts, payload), returns_lost_(plan.returns_lost) {}

  /// Sends the frame that the compressor, of gradients or drifts, has encoded for `step`, and commits what of it has arrived.
  template <class Compressor>
  void send(worker_link& server, const std::shared_ptr<Compressor>& compressor,
            const lamina::encoded_frame& frame, std::uint64_t step, const step_report& report) {
    const sent_frame sent =
        way_.send(frame, compressor->chosen(), step, [&](const auto* chunks, const auto& owed) {
          return server.push(report, {.frame = {frame.segments(), compressor}, .chunks = chunks}, owed);
        });
    if (sent.arrived && returns_lost_) {
      compressor->commit(*sent.arrived);
    } else {
      compressor->commit();
    }
  }

 private:
  frame_way way_;
  bool returns_lost_;
};

/// The slice that each of so many workers owns of every part, where there is no server: of whole chunks, if some of them may be lost.
lamina::part_slices slices_of(const loss_plan& plan, const lamina::layout& parts,
                              lamina::payload_type payload, std::size_t workers);

/// A frame of parameters as it goes to clients: what each of them lacks goes with it.
class parameter_way {
 public:
  parameter_way(const loss_plan& plan, const lamina::layout& model)
      : cutter_(plan, model, lamina::payload_type::as_is) {}

  /// The frame for all, of encode_for_all(); `owner` of what it points to. What was lost is to be committed.
  template <class Parameters>
  std::vector<sent_frame> send_to_all(server_link& clients, const lamina::parameter_publisher<float>& frames,
                                      const lamina::encoded_frame& frame, std::uint32_t bound_ppm,
                                      Parameters&& parameters, std::shared_ptr<const void> owner) const {
    const auto chunks = cutter_.cut(frame, frames.published_to_all(), bound_ppm);
    std::vector<lamina::bounded::owed_parameters> owed;
    std::vector<lamina::bounded::obligations> of_clients;
    for (std::size_t c = 0; chunks && c < clients.clients(); ++c)
      owed.push_back(lamina::bounded::owed<float>(*chunks, frames.pending(c), parameters));
    for (const auto& each : owed) of_clients.push_back(each.all());
    return clients.send_frame_to_all(
        message_kind::parameters,
        {.frame = {frame.segments(), std::move(owner)}, .chunks = chunks ? &*chunks : nullptr}, of_clients);
  }
  /// That for one of them, of encode(); only where something can be lost.
  template <class Parameters>
  sent_frame send(server_link& clients, std::size_t client, const lamina::parameter_publisher<float>& frames,
                  const lamina::encoded_frame& frame, std::uint32_t bound_ppm,
                  Parameters&& parameters) const {
    const auto chunks = cutter_.cut(frame, frames.published(client), bound_ppm);
    const auto owed = lamina::bounded::owed<float>(*chunks, frames.pending(client), parameters);
    return clients.send_frame(client, message_kind::parameters,
                              {.frame = {frame.segments(), nullptr}, .chunks = &*chunks}, owed.all());
  }

 private:
  frame_cutter cutter_;
};

/// Writes the parameters that came for `step` into `layers(l)`, a std::span<float> of each layer: what was lost of them stays as it is.
/// Throws link_error, naming the sender, for a bad frame.
template <class Layers>
void write_parameters(const message& parameters, const std::string& sender, const lamina::layout& model,
                      std::uint64_t step, Layers&& layers) {
  const auto frame = read_from(sender, [&] {
    auto decoded = lamina::decode<float>(parameters.bytes, model);
    lamina::expect(decoded, lamina::frame_kind::parameters, step);
    return decoded;
  });
  const arrived_frame* const lossy = parameters.transfer.get();
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (lossy == nullptr) {
      frame.apply_to(l, layers(l));
    } else {
      frame.restore(l, layers(l), lossy->arrived);
    }
  }
  if (lossy == nullptr) return;
  for (const arrived_frame::repair& each : lossy->repairs)
    std::memcpy(&layers(each.layer)[each.begin], each.elements.data(), each.elements.size());
}

/// The last frame for this client has arrived, but for what was lost.
void commit(lamina::parameter_publisher<float>& frames, std::size_t client, const sent_frame& sent);

/// Whether frames have a checksum: not where some of them may be lost, as it would not hold; packets have one.
inline lamina::frame_checksum checksum_of(const loss_plan& plan) {
  return plan.is_lossy ? lamina::frame_checksum::none : lamina::frame_checksum::xxh3;
}

}  // namespace lab
