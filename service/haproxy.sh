#!/bin/sh
# Ray runs this in place of HAProxy. It corrects the configuration that Ray has just written, then becomes HAProxy:
#   - the API alone listens beyond loopback, on the service's own host: Ray's replicas stay on 127.0.0.1;
#   - HAProxy's metrics and statistics pages, which Ray puts on every interface, are left out;
#   - Serve's pages under /-/, which ask for no key, are no routes of the API;
#   - headers by which a client could change what Serve does with its request are taken out, and an x-request-id that
#     Serve cannot read is refused;
#   - its control socket is for this user alone;
#   - no ingress means 503 at once: Serve's own proxy, which Ray keeps in reserve, would wait or say 404;
#   - headers have 30 s to arrive, as the body has;
#   - splicing is off: with it, one in twenty clients that leave while they wait for an answer is not noticed;
#   - what HAProxy answers by itself has the shape of the API.
set -eu
missing='{"error": {"message": "expected a route of the API; this path is none; the models are at /v1/models", "type": "invalid_request_error", "param": null, "code": "not_found"}}'
rules="http-request return status 404 content-type application/json string '$missing' if { path,url_dec -m beg /-/ }"
bad_id='{"error": {"message": "x-request-id: expected one, of 1 to 128 visible ASCII characters without commas; got something else; correct it or leave it out", "type": "invalid_request_error", "param": "x-request-id", "code": null}}'
for header in x-request-disconnect-disabled x-request-timeout-seconds x-session-id; do
    rules="$rules\\n    http-request del-header $header"
done
rules="$rules\\n    http-request del-header ^serve[-_]multiplexed[-_]model[-_]id\$ -m reg"
rules="$rules\\n    http-request return status 400 content-type application/json string '$bad_id' if { req.hdr_cnt(x-request-id) gt 0 } !{ req.hdr(x-request-id) -m reg ^[!-~]{1,128}\$ }"
# One that has commas or comes twice counts as several, of which only one would have been looked at.
rules="$rules\\n    http-request return status 400 content-type application/json string '$bad_id' if { req.hdr_cnt(x-request-id) gt 1 }"
previous=
for argument; do
    if [ "$previous" = -f ]; then
        sed -i \
            -e "/^frontend http_frontend/,/^ *bind /s|^ *bind .*|    bind $DELTALOG_BIND\n    $rules|" \
            -e '/^frontend prometheus/,/no log/d' \
            -e '/^listen stats/,$d' \
            -e 's/mode 666 level admin/mode 600 level admin/' \
            -e '/^ *server .* backup$/d' \
            -e '/^ *option splice-/d' \
            -e 's|^ *timeout client .*|&\n    timeout http-request 30s|' \
            -e "s|^ *errorfile \(50[234]\) .*|    errorfile \1 $DELTALOG_UNAVAILABLE|" \
            -e '/^backend default_backend/,/return/s|http-request return .*|http-request deny deny_status 503|' \
            "$argument"
    fi
    previous=$argument
done
exec "$DELTALOG_HAPROXY" "$@"
