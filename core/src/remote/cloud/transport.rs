//! The transport of the clients. It refuses an answer that is not from a store.
//!
//! The clients take any page for an empty listing, such as the login page of a proxy. A root would
//! then look empty. Parts and ranges keep a [`Pace`].

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

use super::pace::Pace;

/// The statuses of a store that wants fewer requests.
const BUSY: [u16; 2] = [429, 503];
/// The least bytes of the body of a part.
const LARGE_BODY: usize = 1 << 20;
/// The most characters of a foreign answer that a message shows.
const SHOWN_NAME: usize = 40;

/// Connects clients of one cloud.
#[derive(Clone, Debug)]
pub(super) struct CheckedConnector {
    /// The outermost element of a listing.
    listing: &'static str,
    /// That of all clients of a store.
    pace: Arc<Pace>,
}

impl CheckedConnector {
    /// A connector of clients whose listings have this outermost element.
    pub(super) fn new(listing: &'static str) -> Self {
        Self { listing, pace: Arc::default() }
    }
}

impl HttpConnector for CheckedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(CheckedService { client, listing: self.listing, pace: Arc::clone(&self.pace) }))
    }
}

#[derive(Debug)]
struct CheckedService {
    client: HttpClient,
    listing: &'static str,
    pace: Arc<Pace>,
}

impl CheckedService {
    /// Returns the outermost element that the answer to a request must have, if it must be XML.
    fn wanted(&self, request: &HttpRequest) -> Option<&'static str> {
        let mut query = request.uri().query()?.split('&');
        match request.method().as_str() {
            "GET" => query.any(|one| matches!(one, "list-type=2" | "comp=list")).then_some(self.listing),
            "POST" => query.any(|one| matches!(one, "delete" | "delete=")).then_some("DeleteResult"),
            _ => None,
        }
    }
}

/// True for a part or a range. Other requests are small, and wait for no others.
fn is_data(request: &HttpRequest) -> bool {
    let is_put = request.method().as_str() == "PUT";
    is_put && request.body().content_length() >= LARGE_BODY || request.headers().contains_key("range")
}

/// An answer that is not what was asked for.
#[derive(Debug, thiserror::Error)]
#[error(
    "the answer is no {wanted}, but {found}: the server is no store of this kind, or a proxy has answered"
)]
struct ForeignAnswer {
    wanted: &'static str,
    found: String,
}

#[async_trait]
impl HttpService for CheckedService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let wanted = self.wanted(&request);
        let permit = if is_data(&request) { self.pace.permit().await } else { None };
        let began = Instant::now();
        let answer = self.client.execute(request).await;
        if let Some(permit) = permit {
            let status = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
            let is_busy = match status {
                _ if BUSY.contains(&status) => Some(true),
                // An overloaded server also closes connections.
                0 | 500.. => None,
                _ => Some(false),
            };
            self.pace.answered(permit, began, is_busy);
        }
        let answer = answer?;
        let Some(wanted) = wanted.filter(|_| answer.status().is_success()) else { return Ok(answer) };
        let (parts, body) = answer.into_parts();
        let body = body.bytes().await?;
        let found = match outermost(&body) {
            Some(name) if name == wanted => return Ok(HttpResponse::from_parts(parts, body.into())),
            Some(name) => name.chars().take(SHOWN_NAME).collect(),
            None => "no XML".to_owned(),
        };
        Err(HttpError::new(HttpErrorKind::Decode, ForeignAnswer { wanted, found }))
    }
}

/// Returns the name of the outermost element of XML, without its namespace.
fn outermost(body: &[u8]) -> Option<&str> {
    let mut text = std::str::from_utf8(body).ok()?.trim_start_matches('\u{feff}');
    loop {
        let rest = text.trim_start().strip_prefix('<')?;
        let skipped = match rest {
            _ if rest.starts_with("!--") => "-->",
            _ if rest.starts_with(['?', '!']) => ">",
            _ => {
                let is_end = |sign: char| sign.is_whitespace() || matches!(sign, '>' | '/');
                let name = rest.split(is_end).next()?;
                return Some(name.rsplit(':').next().unwrap_or(name));
            }
        };
        text = rest.split_once(skipped)?.1;
    }
}

#[cfg(test)]
mod tests {
    use super::outermost;

    #[test]
    fn the_outermost_element_names_an_answer() {
        for (body, name) in [
            ("<ListBucketResult></ListBucketResult>", Some("ListBucketResult")),
            ("<ListBucketResult/>", Some("ListBucketResult")),
            (
                "\u{feff}<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"http://s3\">",
                Some("ListBucketResult"),
            ),
            ("<!-- <a> --><s3:ListBucketResult>", Some("ListBucketResult")),
            ("<!DOCTYPE html><html lang=\"en\">", Some("html")),
            ("<html><ListBucketResult/></html>", Some("html")),
            ("{\"kind\": \"storage#objects\"}", None),
            ("<?xml", None),
            ("<!-- <ListBucketResult>", None),
            ("", None),
        ] {
            assert_eq!(outermost(body.as_bytes()), name, "{body}");
        }
        assert_eq!(outermost(b"\xff<ListBucketResult>"), None);
    }
}
