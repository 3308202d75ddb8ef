"""An independent implementation of mDNS (python-zeroconf) as a peer: announces one service of our type and prints, as a
line of JSON each, what it sees of others, until its standard input closes.

zeroconf_peer.py OUR_IPV4 INSTANCE PORT"""

import json
import socket
import sys
import threading
import time

from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

TYPE = "_covey._tcp.local."


class Listener(ServiceListener):
    def say(self, event, zc, name):
        info, end = None, time.monotonic() + 3
        while event != "gone" and time.monotonic() < end:
            info = zc.get_service_info(TYPE, name, 3000)
            if info and len({":" in a for a in info.parsed_addresses()}) == 2:
                break  # an address of each family
            threading.Event().wait(0.05)
        line = {"event": event, "name": name}
        if info:
            line.update(port=info.port, server=info.server, addresses=info.parsed_scoped_addresses(),
                        txt={k.decode(): v.decode() if v else None for k, v in info.properties.items()},
                        host_ttl=info.host_ttl, other_ttl=info.other_ttl)
        print(json.dumps(line), flush=True)

    def add_service(self, zc, type_, name):
        self.say("new", zc, name)

    def update_service(self, zc, type_, name):
        self.say("changed", zc, name)

    def remove_service(self, zc, type_, name):
        self.say("gone", zc, name)


def main():
    address, instance, port = sys.argv[1:4]
    zc = Zeroconf(ip_version=IPVersion.All)
    ServiceBrowser(zc, TYPE, Listener())
    service = ServiceInfo(TYPE, f"{instance}.{TYPE}", addresses=[socket.inet_aton(address)], port=int(port),
                          properties={"v": "1", "n": "stranger", "t": "00ff"}, server=f"{instance}.local.")
    zc.register_service(service)
    print(json.dumps({"event": "registered"}), flush=True)
    sys.stdin.read()
    zc.unregister_service(service)
    zc.close()


main()
