-- Asks the sidecar which server holds most of a request's text, and sets txn.pic_server. Without an answer in time, and
-- whatever else fails, nothing is set. HAProxy's servers have their addresses as names.
core.register_action("pic_route", { "http-req" }, function(txn)
  local client = core.httpclient()
  local headers = { ["content-type"] = { "application/json" } }
  local salt = txn.f:req_hdr("x-pic-salt") or txn.f:req_hdr("x-request-id-pic-salt")
  if salt then
    headers["x-pic-salt"] = { salt }
  end
  local answer = client:post({
    url = os.getenv("PIC_ROUTE") .. "/route?path=" .. txn.f:path(),
    headers = headers,
    body = txn.f:req_body(),
    timeout = 700,
  })
  local name = answer and answer.status == 200 and string.match(answer.body, '"server": "http://([^"/]+)"')
  if name then
    txn:set_var("txn.pic_server", name)
  end
end)
