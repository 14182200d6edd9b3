// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/bounded/bounded.hpp>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "messages/mpi_session.hpp"
#include "ways.hpp"

/// What is lost of frames, and sent again: how they are cut into packets, and what of them must arrive.
namespace lab {

/// What of a frame may be lost on its way. A run that loses nothing cuts nothing and remembers nothing.
struct loss_plan {
  bool is_lossy = false;           ///< frames are cut, and go over a way that loses some of them
  std::uint32_t bound_up_ppm = 0;  ///< p of gradients, in parts per million
  unsigned max_losses = 3;  ///< a chunk of gradients that was lost so often in a row must arrive; 0: never
  bool has_tags = true;     ///< the smallest of each layer are dropped first
  std::size_t packet_data_bytes = 1416;  ///< what a packet has room for

  /// Whether frames have a checksum: where some of them may be lost it would not hold; packets have one.
  lamina::frame_checksum checksum() const {
    return is_lossy ? lamina::frame_checksum::none : lamina::frame_checksum::xxh3;
  }
};

/// How frames of these fragments are cut.
inline lamina::bounded::chunk_grid frame_grid(const lamina::layout& fragments, const loss_plan& plan) {
  constexpr auto as_is = lamina::payload_type::as_is;
  return lamina::bounded::chunk_grid::of<float>(
      fragments, as_is, lamina::bounded::chunk_elements<float>(as_is, plan.packet_data_bytes));
}

/// Cuts the frames of one kind.
class frame_cutter {
 public:
  frame_cutter(const loss_plan& plan, const lamina::layout& fragments) : has_tags_(plan.has_tags) {
    if (plan.is_lossy) grid_ = frame_grid(fragments, plan);
  }

  /// None if nothing can be lost. Points into the frame.
  std::optional<lamina::bounded::frame_chunks> cut(const lamina::encoded_frame& frame,
                                                   const lamina::selection& layers,
                                                   std::uint32_t bound_ppm) const {
    if (!grid_) return std::nullopt;
    return lamina::bounded::frame_chunks(frame, layers, *grid_, {.bound_ppm = bound_ppm, .tags = has_tags_});
  }
  const std::optional<lamina::bounded::chunk_grid>& grid() const { return grid_; }

 private:
  bool has_tags_;
  std::optional<lamina::bounded::chunk_grid> grid_;
};

/// Frames of gradients from a worker to the server, rank 0. What was lost too often must arrive.
class gradient_way {
 public:
  gradient_way(way& over, const loss_plan& plan, const lamina::layout& fragments)
      : way_(over), plan_(plan), cutter_(plan, fragments) {
    if (cutter_.grid()) memory_.emplace(*cutter_.grid());
  }

  /// What arrived, and by which chunks; none where nothing can be lost.
  struct sent {
    std::optional<lamina::delivery> arrived;
    std::optional<lamina::bounded::frame_chunks> chunks;
  };
  sent send(const lamina::encoded_frame& frame, const lamina::selection& layers) {
    sent result{.arrived = {}, .chunks = cutter_.cut(frame, layers, plan_.bound_up_ppm)};
    lamina::bounded::obligations owed;
    if (memory_) owed.required = memory_->required(layers, plan_.max_losses);
    constexpr std::size_t server = 0;
    result.arrived = way_.send({&server, 1}, frame, result.chunks ? &*result.chunks : nullptr, {&owed, 1})[0];
    if (result.arrived && memory_) memory_->note(*result.arrived);
    return result;
  }

 private:
  way& way_;
  loss_plan plan_;
  frame_cutter cutter_;
  std::optional<lamina::bounded::loss_memory> memory_;
};

/// The elements of frames, and those that did not arrive.
struct element_counts {
  std::uint64_t sent = 0;
  std::uint64_t lost = 0;

  void add(const lamina::delivery& arrived) {
    sent += arrived.sent().sent_elements();
    lost += arrived.lost_elements();
  }
  double lost_share() const { return sent == 0 ? 0 : static_cast<double>(lost) / static_cast<double>(sent); }
};

/// The same reply to all workers, who have all seen the same.
template <class Parameters>
lamina::server_reply reply_to_all(lamina::server<float>& server, const Parameters& parameters) {
  for (std::size_t w = 1; w < server.senders(); ++w) static_cast<void>(server.reply(w, parameters));
  return server.reply(0, parameters);
}
inline void commit_all(lamina::server<float>& server, const lamina::server_reply& reply) {
  for (std::size_t w = 0; w < server.senders(); ++w) server.commit(w, reply.clock());
}

/// Sends the reply to these clients, all of it, and commits it. Says what arrived of how much.
inline element_counts send_parameters(way& over, const frame_cutter& cutter, lamina::server<float>& server,
                                      const lamina::server_reply& reply,
                                      std::span<const std::size_t> clients) {
  const auto chunks = cutter.cut(reply.frame(), reply.sent(), 0);
  element_counts counts;
  for (const auto& each : over.send(clients, reply.frame(), chunks ? &*chunks : nullptr))
    if (each) counts.add(*each);
  commit_all(server, reply);
  return counts;
}

/// Hands the frames of all workers to the server. Throws link_error, naming the worker by `name_of(rank)`, for a bad one.
template <class NameOf>
element_counts take_gradients(lamina::server<float>& server, std::span<const arrival> frames,
                              const NameOf& name_of) {
  element_counts counts;
  for (const arrival& each : frames) {
    if (each.arrived) counts.add(*each.arrived);
    if (const std::error_code bad = server.add_view(each.bytes))
      throw link_error(name_of(each.rank) + " sent a bad frame: " + bad.message());
  }
  return counts;
}

}  // namespace lab
