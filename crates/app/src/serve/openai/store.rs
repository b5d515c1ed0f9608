//! Replies that later requests refer to: `previous_response_id`, and `GET` by id.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::text::chat::Message;

/// The most replies that are kept, and what they may hold together.
const MAX_REPLIES: usize = 1000;
const MAX_BYTES: usize = 64 << 20;

/// A reply, and the conversation up to its end.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The reply as it was sent.
    pub reply: Value,
    /// What the request said, as items.
    pub input: Vec<Value>,
    /// The conversation, the reply included; instructions are not part of it.
    pub conversation: Vec<Message>,
}

/// Replies in memory, the oldest of which are forgotten first.
#[derive(Debug, Default)]
pub struct Responses {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    replies: HashMap<String, (Arc<Stored>, usize)>,
    order: VecDeque<String>,
    bytes: usize,
}

impl Responses {
    /// Keeps a reply.
    pub fn insert(&self, id: &str, stored: Stored) {
        let bytes = size(&stored);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > MAX_BYTES {
            return;
        }
        inner.bytes += bytes;
        inner.order.push_back(id.to_owned());
        inner.replies.insert(id.to_owned(), (Arc::new(stored), bytes));
        while inner.replies.len() > MAX_REPLIES || inner.bytes > MAX_BYTES {
            let Some(oldest) = inner.order.pop_front() else { break };
            inner.forget(&oldest);
        }
    }

    /// A reply by its id.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.replies.get(id).map(|(stored, _)| Arc::clone(stored))
    }

    /// Forgets a reply; false if there was none.
    pub fn remove(&self, id: &str) -> bool {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.order.retain(|other| other != id);
        inner.forget(id)
    }
}

impl Inner {
    fn forget(&mut self, id: &str) -> bool {
        let Some((_, bytes)) = self.replies.remove(id) else { return false };
        self.bytes -= bytes;
        true
    }
}

/// Roughly the memory that a reply takes.
fn size(stored: &Stored) -> usize {
    let message = |m: &Message| {
        let calls = m.tool_calls.iter().map(|call| call.arguments.to_string().len() + 64);
        m.content.len() + m.reasoning.as_ref().map_or(0, String::len) + calls.sum::<usize>() + 128
    };
    let values = std::iter::once(&stored.reply).chain(&stored.input);
    values.map(|value| value.to_string().len()).sum::<usize>()
        + stored.conversation.iter().map(message).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::chat::Role;

    fn stored(bytes: usize) -> Stored {
        let conversation = vec![Message::new(Role::User, "x".repeat(bytes))];
        Stored { reply: Value::Null, input: Vec::new(), conversation }
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let responses = Responses::default();
        for index in 0..MAX_REPLIES + 5 {
            responses.insert(&index.to_string(), stored(1));
        }
        assert!(responses.get("4").is_none() && responses.get("5").is_some());
        responses.insert("big", stored(MAX_BYTES - 1000));
        assert!(responses.get("big").is_some());
        let left = responses.inner.lock().unwrap().replies.len();
        assert!(left < 10, "{left}");
        responses.insert("too big", stored(MAX_BYTES + 1));
        assert!(responses.get("too big").is_none() && responses.get("big").is_some());
    }

    #[test]
    fn a_removed_reply_is_gone() {
        let responses = Responses::default();
        responses.insert("a", stored(1));
        assert!(responses.remove("a") && !responses.remove("a"));
        assert!(responses.get("a").is_none());
        assert_eq!(responses.inner.lock().unwrap().bytes, 0);
    }
}
