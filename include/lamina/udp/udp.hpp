// SPDX-License-Identifier: MIT
#pragma once

/// All of lamina/udp: transfers of bounded loss over the sockets of Linux. In reading order: address.hpp, socket.hpp,
/// control.hpp, meeting.hpp, peer.hpp, transport.hpp. Each includes the one before it, and besides only what that does not bring. A program
/// needs parse_addresses(), open_sockets, transport_options and transport.

#include "lamina/udp/transport.hpp"
