// Removes known nonces of agents from requests, with nginx's module njs. Put this file into /etc/nginx, and this into
// nginx.conf:
//
//   load_module modules/ngx_http_js_module.so;
//   http {
//     js_import pic_nonces from /etc/nginx/pic_nonces.js;
//     js_set $pic_body pic_nonces.body;
//     server {
//       location ~ ^/v1/(chat/completions|completions|messages|responses)$ {
//         client_max_body_size 64m;
//         client_body_buffer_size 64m;
//         proxy_set_body $pic_body;
//         proxy_buffering off;
//         proxy_pass http://127.0.0.1:30000;
//       }
//     }
//   }

// What stays, what is removed right after it, and the characters within which it begins.
const NONCES = [];
let isChanged = false;

function strip(text) {
  NONCES.forEach(nonce => {
    const found = new RegExp('(' + nonce[0] + ')' + nonce[1]).exec(text);
    if (found && found.index <= nonce[2]) {
      const kept = found.index + found[1].length;
      isChanged = true;
      text = text.slice(0, kept) + text.slice(found.index + found[0].length);
    }
  });
  return text;
}

function stripContent(content) {
  if (typeof content === 'string') {
    return strip(content);
  }
  (content || []).forEach(part => {
    if (part && part.text) {
      part.text = strip(part.text);
    }
  });
  return content && content.filter(part => !part || part.text !== '');
}

function body(r) {
  const text = r.requestText || '';
  isChanged = false;
  try {
    return stripped(text);
  } catch (e) {
    // No request that is known: the server says what is wrong with it.
    return text;
  }
}

function stripped(text) {
  const request = JSON.parse(text);
  ['system', 'instructions'].forEach(key => {
    if (request[key]) {
      request[key] = stripContent(request[key]);
    }
  });
  [request.messages, request.input].forEach(messages => {
    const first = (messages || [])[0] || {};
    if (['system', 'developer'].includes(first.role)) {
      first.content = stripContent(first.content);
      if (messages.length > 1 && (!first.content || !first.content.length)) {
        messages.shift();
      }
    }
  });
  return isChanged ? JSON.stringify(request) : text;
}

export default { body };
