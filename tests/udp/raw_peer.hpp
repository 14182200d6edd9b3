// SPDX-License-Identifier: MIT
#pragma once

#include "ranks.hpp"

namespace lamina_test {

/// A packet with a changed header, and a good check unless the secret is another.
template <class Change>
bounded::outgoing_packet forged(bounded::outgoing_packet packet, const Change& change,
                                std::uint64_t secret = run_secret) {
  std::error_code error;
  bounded::packet_header header = bounded::read_packet_header(packet.header, error);
  change(header);
  bounded::keyed_check check(secret);
  packet.header = bounded::write_packet_header(header, packet.data, check);
  return packet;
}

/// A worker, driven by hand: it has met the server, knows the secret, and says whatever a test wants.
class raw_peer {
 public:
  raw_peer(const ranks_given& given, udp::open_sockets here, const std::vector<udp::rank_addresses>& all,
           std::uint16_t rank = 1)
      : grid(grid_of(given)),
        sockets(std::move(here)),
        server(all[0].data[0]),
        channel(met(sockets, all, options_of(given, rank, all.size())), run_secret,
                bounded::control_limits(grid)),
        sender(grid,
               {.rank = rank, .receiver = 0, .secret = run_secret, .rate = {.link_bits = 10'000'000'000}}),
        receiver(grid, {.rank = rank,
                        .sender = 0,
                        .secret = run_secret,
                        .kind = lamina::frame_kind::parameters,
                        .most_bound_ppm = 500'000}),
        writer(run_secret, 1 << 20) {}

  udp::packet_socket& path() { return sockets.paths[0]; }
  /// A control message of its own making.
  void say(bounded::control_type type, std::uint32_t transfer, std::uint32_t round,
           const std::vector<std::uint32_t>& numbers = {}) {
    writer.clear();
    for (const std::uint32_t each : numbers) writer.put(each);
    channel.put(writer.finish(type, transfer, round));
    channel.write();
  }
  /// What its machines want to say, and their packets, of which those are left out that `keeps` is false for.
  void pump(const std::function<bool(std::size_t)>& keeps = {}) {
    const auto put = [this](std::span<const std::byte> said) { channel.put(said); };
    say_all(sender, clock_now(), put);
    while (const auto packet = sender.next_packet(clock_now())) {
      if (!keeps || keeps(packets++)) path().put(server, *packet, 0);
      if (!path().has_room()) path().flush();
    }
    path().flush();
    say_all(sender, clock_now(), put);
    say_all(receiver, clock_now(), put);
    channel.write();
  }
  /// Runs until `is_over`, which is asked for each control message before a machine hears of it.
  void run(const std::function<bool(const bounded::control_message&)>& is_over,
           const std::function<bool(std::size_t)>& keeps = {}) {
    for (;;) {
      pump(keeps);
      path().receive(64, [&](const endpoint&, std::span<const std::byte> bytes, bounded::instant) {
        receiver.on_datagram(bytes, clock_now());
      });
      switch (channel.read()) {
        case control_channel::arrival::message:
          if (is_over(channel.message())) return;
          hear(channel.message());
          break;
        case control_channel::arrival::nothing:
          std::this_thread::sleep_for(200us);
          break;
        default:
          return;
      }
    }
  }
  /// Until a message of this type has come.
  void run_until(bounded::control_type type, const std::function<bool(std::size_t)>& keeps = {}) {
    run([&](const bounded::control_message& come) { return come.header.type == type; }, keeps);
  }
  /// Until BEGIN has come, which is answered with READY.
  void say_ready() {
    run_until(bounded::control_type::begin);
    say(bounded::control_type::ready, channel.message().header.transfer, 0, {0, 0, 1});
  }
  /// Until READY has come for a frame of its own.
  void open(const bounded::frame_chunks& chunks) {
    sender.begin(chunks);
    run_until(bounded::control_type::ready);
    sender.on_control(channel.message());
  }
  void run_until_closed() {
    run([](const bounded::control_message&) { return false; });
  }

  bounded::chunk_grid grid;
  udp::open_sockets sockets;
  endpoint server;
  control_channel channel;
  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;
  bounded::control_writer writer;
  std::size_t packets = 0;

 private:
  static descriptor met(const udp::open_sockets& here, const std::vector<udp::rank_addresses>& all,
                        const udp::transport_options& options) {
    descriptor made = std::move(meet_all(here, all, options)[0]);
    udp::detail::set_control_options(made.get(), 20'000);
    return made;
  }
  void hear(const bounded::control_message& come) {
    using bounded::control_type;
    switch (come.header.type) {
      case control_type::begin:
      case control_type::probe:
        receiver.on_control(come, clock_now());
        break;
      case control_type::ready:
      case control_type::report:
      case control_type::wanted:
      case control_type::stop:
        sender.on_control(come);
        break;
      case control_type::ping: {
        std::uint64_t sent_at = 0;
        std::ignore = bounded::read_body(come.body, sent_at);
        channel.put(writer.write(control_type::pong, 0, 0, sent_at));
        break;
      }
      default:
        break;
    }
  }
};

/// A server, a raw worker 0, and as many good workers as are wanted. What each but the raw one threw; of it what `peer_body` did.
inline std::vector<std::string> run_with_raw_peer(const ranks_given& given,
                                                  const std::function<void(udp::transport&)>& body,
                                                  const std::function<void(raw_peer&)>& peer_body,
                                                  std::size_t good_workers = 0) {
  return run_started(2 + good_workers, given, [&](std::size_t r, udp::open_sockets here, const auto& all) {
    if (r == 1) {
      raw_peer peer(given, std::move(here), all);
      peer_body(peer);
    } else {
      udp::transport over(std::move(here), all, options_of(given, r, all.size()));
      body(over);
    }
  });
}

}  // namespace lamina_test
