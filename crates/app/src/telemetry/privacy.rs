//! What is kept of requests' text: nothing unless asked for, never much, and no secrets.

use std::sync::LazyLock;

use regex::Regex;

use super::record::{Bodies, Record};

/// What stands in place of a secret.
pub const REDACTED: &str = "[redacted]";
/// What is held beyond the cap until secrets are taken out, so that none is cut in two and missed.
const SLACK_BYTES: usize = 4096;

/// Shapes that only secrets and bulky data have.
const SECRETS: [&str; 12] = [
    r#"(?i)\bauthorization\\?["']?\s*[:=]\s*\\?["']?(bearer|basic|token)\s+[^\s"'\\,;]{4,}"#,
    r"(?i)\bbearer\s+[a-z0-9._~+/=-]{20,}",
    r"\b(sk|pk|rk)[-_][A-Za-z0-9_-]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}",
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bAIza[0-9A-Za-z_-]{30,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\z)",
    r#"(?i)\\?"?(password|passwd|secret|api[_-]?key|access[_-]?token)\\?"?\s*[:=]\s*\\?"[^"\\]{4,}"#,
    r"data:[a-z0-9.+/-]+;base64,[A-Za-z0-9+/=]+",
];

static SECRET_SHAPES: LazyLock<Vec<Regex>> =
    LazyLock::new(|| SECRETS.iter().filter_map(|shape| Regex::new(shape).ok()).collect());

/// How much of requests' text is kept, and what is taken out of it.
#[derive(Clone, Debug, Default)]
pub struct Privacy {
    /// The most bytes of a request's body and of its answer; `None` keeps neither.
    pub body_bytes: Option<usize>,
    /// Texts that are never kept: the server's own keys.
    pub secrets: Vec<String>,
    /// More shapes to take out, beside those of common secrets.
    pub redact: Vec<Regex>,
}

impl Privacy {
    /// Takes secrets out of everything that came from outside, and cuts bodies to their size.
    pub fn scrub(&self, record: &mut Record) {
        let free_text = [&mut record.client, &mut record.model, &mut record.request_id]
            .into_iter()
            .chain(record.session.as_mut())
            .chain(record.error.as_mut().map(|error| &mut error.message))
            .chain(record.sampling.constraint.as_mut())
            .chain(record.sampling.reasoning.as_mut())
            .chain(&mut record.tool_calls);
        free_text.for_each(|text| self.redact(text));
        let Some(bytes) = self.body_bytes else {
            record.bodies = None;
            return;
        };
        if let Some(bodies) = &mut record.bodies {
            for text in [&mut bodies.request, &mut bodies.response] {
                self.redact(text);
                bodies.truncated |= text.len() > bytes;
                text.truncate(text.floor_char_boundary(bytes));
            }
        }
    }

    fn redact(&self, text: &mut String) {
        for secret in self.secrets.iter().filter(|secret| !secret.is_empty()) {
            if text.contains(secret.as_str()) {
                *text = text.replace(secret.as_str(), REDACTED);
            }
        }
        for shape in SECRET_SHAPES.iter().chain(&self.redact) {
            if shape.is_match(text) {
                *text = shape.replace_all(text, REDACTED).into_owned();
            }
        }
    }

    pub(super) fn keeper(&self) -> BodyKeeper {
        BodyKeeper { room: self.body_bytes.map(|bytes| bytes + SLACK_BYTES), bodies: None }
    }
}

/// Collects the bodies of one request, no more than may be kept of them.
#[derive(Clone, Debug, Default)]
pub(super) struct BodyKeeper {
    room: Option<usize>,
    bodies: Option<Bodies>,
}

impl BodyKeeper {
    pub(super) fn request(&mut self, body: &[u8]) {
        let Some(room) = self.room else { return };
        let bodies = self.bodies.get_or_insert_default();
        // A character costs no more than four bytes, so this is enough to fill the room.
        let head = &body[..body.len().min(room)];
        append(&mut bodies.request, &String::from_utf8_lossy(head), room, &mut bodies.truncated);
        bodies.truncated |= head.len() < body.len();
    }

    pub(super) fn response(&mut self, text: &str) {
        let Some(room) = self.room else { return };
        let bodies = self.bodies.get_or_insert_default();
        append(&mut bodies.response, text, room, &mut bodies.truncated);
    }

    pub(super) fn take(&mut self) -> Option<Bodies> {
        self.bodies.take()
    }
}

fn append(to: &mut String, text: &str, room: usize, truncated: &mut bool) {
    let free = room.saturating_sub(to.len());
    let fits = text.floor_char_boundary(free.min(text.len()));
    to.push_str(&text[..fits]);
    *truncated |= fits < text.len();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::record::{ErrorClass, Fault};

    fn kept(privacy: &Privacy, request: &str, response: &[&str]) -> Option<Bodies> {
        let mut keeper = privacy.keeper();
        keeper.request(request.as_bytes());
        response.iter().for_each(|text| keeper.response(text));
        let mut record = Record { bodies: keeper.take(), ..Record::default() };
        privacy.scrub(&mut record);
        record.bodies
    }

    #[test]
    fn bodies_are_off_unless_asked_for() {
        assert_eq!(kept(&Privacy::default(), "hello", &["world"]), None);
        // Not even one that got into the record some other way.
        let mut record = Record { bodies: Some(Bodies::default()), ..Record::default() };
        Privacy::default().scrub(&mut record);
        assert_eq!(record.bodies, None);
    }

    #[test]
    fn bodies_are_capped_between_characters() {
        let privacy = Privacy { body_bytes: Some(5), ..Privacy::default() };
        let bodies = kept(&privacy, "ééé", &["ab", "cd"]).unwrap();
        assert_eq!((bodies.request.as_str(), bodies.response.as_str()), ("éé", "abcd"));
        assert!(bodies.truncated);
        assert!(!kept(&privacy, "abcde", &["x"]).unwrap().truncated);
        let mut keeper = privacy.keeper();
        keeper.request(&[b'x'; 1 << 20]);
        (0..1 << 14).for_each(|_| keeper.response("0123456789"));
        let held = keeper.take().unwrap();
        assert!(held.request.len() + held.response.len() <= 2 * (5 + SLACK_BYTES));
    }

    #[test]
    fn secrets_are_taken_out() {
        assert_eq!(SECRET_SHAPES.len(), SECRETS.len(), "a shape is no regular expression");
        let privacy = Privacy {
            body_bytes: Some(1000),
            secrets: vec!["own-key".into(), String::new()],
            redact: vec![Regex::new("order [0-9]+").unwrap()],
        };
        for (text, expected) in [
            ("key own-key.", "key [redacted]."),
            ("order 1234 came", "[redacted] came"),
            ("use sk-proj-abcdefghijklmnop1234 now", "use [redacted] now"),
            ("with Authorization: Bearer abc.def-123456;", "with [redacted];"),
            ("{\"authorization\": \"Basic dXNlcg==\"}", "{\"[redacted]\"}"),
            ("bearer abcdefghijklmnopqrstuvwxyz", "[redacted]"),
            ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
            ("ghp_0123456789abcdefghij", "[redacted]"),
            (
                "a -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- b",
                "a [redacted] b",
            ),
            ("-----BEGIN PRIVATE KEY-----\ncut off", "[redacted]"),
            ("{\"url\":\"data:image/png;base64,iVBORw0KGgo=\"}", "{\"url\":\"[redacted]\"}"),
            ("basic arithmetic, bearer of news", "basic arithmetic, bearer of news"),
        ] {
            let bodies = kept(&privacy, text, &[text]).unwrap();
            assert_eq!((bodies.request.as_str(), bodies.response.as_str()), (expected, expected));
        }
        let password = kept(&privacy, "{\"password\": \"hunter22\"}", &[]).unwrap();
        assert!(!password.request.contains("hunter22"), "{}", password.request);
    }

    #[test]
    fn a_secret_across_the_cap_is_not_cut_and_missed() {
        let secret = "sk-abcdefghijklmnopqrstuvwxyz";
        for cap in 0..60 {
            let privacy = Privacy { body_bytes: Some(cap), ..Privacy::default() };
            let bodies =
                kept(&privacy, &format!("{} {secret} {}", "x".repeat(20), "y".repeat(20)), &[]);
            assert!(!bodies.unwrap().request.contains("sk-a"), "{cap}");
        }
    }

    #[test]
    fn secrets_in_other_fields_go_too() {
        let privacy = Privacy { secrets: vec!["own-key".into()], ..Privacy::default() };
        let message = "no model own-key".to_owned();
        let mut record = Record {
            client: "own-key".into(),
            session: Some("s own-key".into()),
            error: Some(Fault { class: ErrorClass::BadRequest, code: "x".into(), message }),
            tool_calls: vec!["own-key".into()],
            ..Record::default()
        };
        privacy.scrub(&mut record);
        assert!(!serde_json::to_string(&record).unwrap().contains("own-key"));
    }
}
