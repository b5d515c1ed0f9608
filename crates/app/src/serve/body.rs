//! Bodies of requests: read within limits, parsed leniently, with all that was ignored named.

use std::collections::BTreeSet;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::errors::ApiError;
use super::exchange::Exchange;
use super::objects::Objects;
use super::state::App;
use crate::telemetry::ErrorClass;

/// A parsed JSON body. Fields that its type doesn't know are named in the reply's headers.
#[derive(Debug)]
pub struct Json<T>(pub T);

/// Fields that would change an answer and that this server can't honour: a name, and the value that
/// changes nothing. `null` never does.
pub type Unsupported = &'static [(&'static str, &'static str)];

/// Bodies that know what they can't do.
pub trait RequestBody: DeserializeOwned {
    /// Fields that are refused unless they have their neutral value, in JSON.
    const UNSUPPORTED: Unsupported = &[];
}

impl<T: RequestBody> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Json<T>, ApiError> {
        let exchange = request.extensions().get::<Exchange>().cloned();
        let from = Instant::now();
        let bytes = read(request, app).await?;
        if let Some(exchange) = &exchange {
            exchange.body(&bytes, from);
        }
        let (value, ignored) = parse(&bytes, T::UNSUPPORTED)?;
        if let Some(exchange) = &exchange {
            exchange.ignored(ignored);
        }
        Ok(Json(value))
    }
}

async fn read(request: Request, app: &App) -> Result<Bytes, ApiError> {
    let limit = app.options.max_body_bytes;
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > limit as u64) {
        return Err(too_large(limit));
    }
    let body = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(app.options.upload_timeout, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(limit)),
        Ok(Err(error)) => {
            let what = format!("the request's body did not arrive whole: {error}");
            Err(ApiError::bad_request("incomplete_body", what))
        }
        Err(_) => Err(ApiError::new(
            ErrorClass::Timeout,
            StatusCode::REQUEST_TIMEOUT,
            "upload_timeout",
            "the request's body did not arrive in time; see --upload-timeout",
        )),
    }
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        ErrorClass::BadRequest,
        StatusCode::PAYLOAD_TOO_LARGE,
        "request_too_large",
        format!("the request's body has more than {limit} bytes; see --max-body"),
    )
}

/// Parses a body; gives the paths of fields that nothing reads.
pub fn parse<T: DeserializeOwned>(
    bytes: &[u8],
    unsupported: Unsupported,
) -> Result<(T, BTreeSet<String>), ApiError> {
    let mut ignored = BTreeSet::new();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(&mut json, &mut track);
    let value = serde_ignored::deserialize(Objects(tracked), |path| {
        ignored.insert(path.to_string().replace('?', "").replace("..", "."));
    });
    let value = value.map_err(|error| json_error(&error, &track.path().to_string()))?;
    json.end().map_err(|error| json_error(&error, "."))?;
    if ignored.iter().any(|name| unsupported.iter().any(|(refused, _)| refused == name)) {
        refuse(bytes, unsupported)?;
    }
    Ok((value, ignored))
}

/// Looks at the values of refused fields; those that change nothing are fine.
fn refuse(bytes: &[u8], unsupported: Unsupported) -> Result<(), ApiError> {
    let body: Value = serde_json::from_slice(bytes).map_err(|error| json_error(&error, "."))?;
    for (name, neutral) in unsupported {
        let value = &body[name];
        let neutral: Value = serde_json::from_str(neutral).unwrap_or_default();
        let same =
            *value == neutral || value.as_f64().is_some() && value.as_f64() == neutral.as_f64();
        if !value.is_null() && !same {
            let what = format!("{name} is not supported; leave it out");
            return Err(ApiError::unsupported(*name, what));
        }
    }
    Ok(())
}

fn json_error(error: &serde_json::Error, path: &str) -> ApiError {
    let what = error.to_string();
    if error.is_data() && path != "." {
        // "at line 1 column 5" says nothing to programs that never saw the text.
        let what = what.split(" at line ").next().unwrap_or(&what);
        return ApiError::invalid(path, format!("{path}: {what}"));
    }
    let what = format!("the request's body is not the JSON object that is expected: {what}");
    ApiError::bad_request("invalid_json", what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    struct Outer {
        inner: Vec<Inner>,
        #[expect(dead_code, reason = "only parsed")]
        n: Option<u32>,
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        a: Option<f32>,
    }

    const REFUSED: Unsupported = &[("audio", "null"), ("typical_p", "1")];

    fn run(body: &Value) -> Result<(Outer, BTreeSet<String>), ApiError> {
        parse(body.to_string().as_bytes(), REFUSED)
    }

    #[test]
    fn unknown_fields_are_named_with_their_path() {
        let body = json!({"inner": [{"a": null}, {"a": 1, "b": 2}], "c": {"d": 1}, "n": null});
        let (outer, ignored) = run(&body).unwrap();
        assert_eq!((outer.inner[0].a, outer.inner[1].a), (None, Some(1.0)));
        assert_eq!(ignored.into_iter().collect::<Vec<_>>(), ["c", "inner.1.b"]);
    }

    #[test]
    fn refused_fields_are_refused_unless_they_change_nothing() {
        for fine in [json!(null), json!(1), json!(1.0)] {
            assert!(run(&json!({"inner": [], "typical_p": fine})).is_ok(), "{fine}");
        }
        for bad in [json!(0.9), json!("1"), json!({})] {
            let error = run(&json!({"inner": [], "typical_p": bad})).unwrap_err();
            assert_eq!(error.code, "unsupported_parameter");
            assert_eq!(error.param.as_deref(), Some("typical_p"));
        }
    }

    #[test]
    fn errors_name_the_field() {
        let error = run(&json!({"inner": [{"a": 1}, {"a": "x"}]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("inner[1].a"));
        assert!(error.message.starts_with("inner[1].a: invalid type: string"), "{error}");
        for text in ["", "{", "[]", "null", "{\"inner\": []} x", "{\"inner\": [], \"inner\": []}"] {
            let error = parse::<Outer>(text.as_bytes(), REFUSED).unwrap_err();
            assert_eq!(error.status, StatusCode::BAD_REQUEST, "{text}");
        }
        // Serde would read a list field by field.
        for body in [json!({"inner": [[1]]}), json!({"inner": [{"a": 1}, [null]]})] {
            let error = run(&body).unwrap_err();
            assert!(error.message.contains("a list, where an object is expected"), "{error}");
            assert!(error.param.unwrap().starts_with("inner["));
        }
        let error = parse::<Outer>(b"[[], 5]", REFUSED).unwrap_err();
        assert_eq!(error.code, "invalid_json");
        assert!(error.message.contains("a list, where an object is expected"), "{error}");
        // What is skipped may be deep; what is read may not.
        let deep = |name: &str| {
            format!("{{\"inner\": [], \"{name}\": {}1{}}}", "[".repeat(9999), "]".repeat(9999))
        };
        assert!(parse::<Outer>(deep("x").as_bytes(), REFUSED).is_ok());
        assert!(parse::<Value>(deep("x").as_bytes(), REFUSED).is_err());
    }
}
