//! The interface of Azure Blob Storage.

use std::fmt::Write;

use crate::call::{Call, Done, Listing, NamedPart, Page, Range, Refusal};
use crate::encoding::{element, elements, http_date};
use crate::http::{Answer, Body, Request, split};
use crate::objects::Object;
use crate::server::Asked;

/// The name of the account. It may be the first segment of paths.
const ACCOUNT: &str = "account";
/// The most entries of a page.
const PAGE: usize = 5000;
/// The most requests of a batch.
const MAX_BATCH: usize = 256;
const BOUNDARY: &str = "batchresponse_fake_store";

/// The container and the key of a path.
fn container_and_key(path: &str) -> Option<(String, String)> {
    let path = path.trim_start_matches('/');
    let below = path.strip_prefix(ACCOUNT).and_then(|rest| rest.strip_prefix('/'));
    split(below.unwrap_or(path))
}

/// Parses a request.
pub fn parsed(request: &Request) -> Result<Asked, Refusal> {
    let (bucket, key) = container_and_key(&request.path).ok_or(Refusal::Malformed)?;
    if request.header("if-match").is_some() {
        return Err(Refusal::NotImplemented);
    }
    let create = request.header("if-none-match") == Some("*");
    let call = match (request.method.as_str(), key.is_empty(), request.parameter("comp")) {
        ("GET", true, Some("list")) => Call::List(listing(request)?),
        ("POST", true, Some("batch")) => Call::BulkDelete { keys: deleted(request)? },
        (_, true, _) => return Err(Refusal::NotImplemented),
        ("PUT", _, None) if request.header("x-ms-blob-type") == Some("BlockBlob") => {
            Call::Put { key, create }
        }
        ("PUT", _, Some("block")) => {
            let part = request.parameter("blockid").ok_or(Refusal::Malformed)?.to_owned();
            Call::Part { upload: key.clone(), key, part }
        }
        ("PUT", _, Some("blocklist")) => {
            let body = request.text().ok_or(Refusal::Malformed)?;
            let ids = elements(body, "Uncommitted").into_iter().chain(elements(body, "Latest"));
            let part = |id: &str| NamedPart { id: id.to_owned(), tag: None, checksum: None };
            let parts = ids.map(part).collect();
            Call::Complete { upload: key.clone(), key, parts, create }
        }
        ("GET", _, None) => {
            let range = request.header("x-ms-range").or(request.header("range"));
            let range = range.map(|range| Range::parse(range).ok_or(Refusal::Malformed));
            Call::Get { key, range: range.transpose()? }
        }
        ("HEAD", _, None) => Call::Head { key },
        ("DELETE", _, None) => Call::Delete { key },
        _ => return Err(Refusal::NotImplemented),
    };
    Ok(Asked { bucket, call })
}

fn listing(request: &Request) -> Result<Listing, Refusal> {
    let text = |name| request.parameter(name).map(str::to_owned);
    let limit = request.parameter("maxresults").map(|limit| limit.parse().map_err(|_| Refusal::Malformed));
    Ok(Listing {
        prefix: text("prefix").unwrap_or_default(),
        delimiter: text("delimiter").unwrap_or_default(),
        from: text("marker").or(text("startFrom")),
        limit: limit.transpose()?.unwrap_or(PAGE).min(PAGE),
    })
}

/// The keys of a batch. Its requests are in the order of their numbers.
fn deleted(request: &Request) -> Result<Vec<String>, Refusal> {
    let body = request.text().ok_or(Refusal::Malformed)?;
    let paths = body.lines().filter_map(|line| line.strip_prefix("DELETE ")?.split(' ').next());
    let key = |path: &str| {
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        container_and_key(path).map(|(_, key)| key)
    };
    let keys: Option<Vec<String>> = paths.map(key).collect();
    keys.filter(|keys| !keys.is_empty() && keys.len() <= MAX_BATCH).ok_or(Refusal::Malformed)
}

/// Adds the facts of an object.
fn described(answer: Answer, object: &Object) -> Answer {
    answer.with("ETag", &object.tag).with("Last-Modified", http_date(object.modified))
}

/// Answers a call that succeeded.
pub fn answer(call: &Call, done: Done) -> Answer {
    let answer = match done {
        Done::Stored(object) => described(Answer::empty(201), &object),
        Done::Found(object, range) => {
            let mut answer = described(Answer::empty(200), &object).with("x-ms-blob-type", "BlockBlob");
            if matches!(call, Call::Get { range: Some(_), .. }) {
                let last = range.end.saturating_sub(1);
                let content = format!("bytes {}-{last}/{}", range.start, object.len);
                answer = answer.with("Content-Range", content);
                answer.status = 206;
            }
            answer.body = Body::Pieces(object.pieces.clone(), range);
            answer
        }
        Done::Deleted | Done::Aborted => Answer::empty(202),
        Done::BulkDeleted(keys) => batch(&keys),
        Done::Listed(page) => Answer::new(200, "application/xml", listed(&page)),
        Done::Started(_) | Done::Part { .. } => Answer::empty(201),
    };
    answer.with("x-ms-request-id", "00000000-0000-0000-0000-000000000000")
}

fn batch(keys: &[(String, bool)]) -> Answer {
    let mut body = String::new();
    for (number, (_, existed)) in keys.iter().enumerate() {
        let line = if *existed { "202 Accepted" } else { "404 The specified blob does not exist." };
        let _ = write!(body, "--{BOUNDARY}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n");
        let _ = write!(body, "\r\nHTTP/1.1 {line}\r\nx-ms-version: 2023-11-03\r\n\r\n");
    }
    let _ = write!(body, "--{BOUNDARY}--\r\n");
    let mut answer = Answer::empty(202).with("Content-Type", format!("multipart/mixed; boundary={BOUNDARY}"));
    answer.body = Body::Bytes(body.into_bytes());
    answer
}

fn listed(page: &Page) -> String {
    let mut body = "<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults><Blobs>".to_owned();
    for (key, object) in &page.objects {
        body.push_str("<Blob>");
        element(&mut body, "Name", key);
        body.push_str("<Properties>");
        element(&mut body, "Last-Modified", &http_date(object.modified));
        element(&mut body, "Etag", &object.tag);
        element(&mut body, "Content-Length", &object.len.to_string());
        element(&mut body, "Content-Type", "application/octet-stream");
        body.push_str("</Properties></Blob>");
    }
    for prefix in &page.prefixes {
        body.push_str("<BlobPrefix>");
        element(&mut body, "Name", prefix);
        body.push_str("</BlobPrefix>");
    }
    body.push_str("</Blobs>");
    element(&mut body, "NextMarker", page.next.as_deref().unwrap_or_default());
    body.push_str("</EnumerationResults>");
    body
}

/// Answers a call that failed.
pub fn refused(refusal: Refusal) -> Answer {
    let (status, code) = match refusal {
        Refusal::BadDigest => (400, "Md5Mismatch"),
        Refusal::Busy => (429, "TooManyRequests"),
        Refusal::Conflict => (409, "OperationConflict"),
        Refusal::Denied => (403, "AuthenticationFailed"),
        Refusal::EntityTooSmall | Refusal::Malformed => (400, "InvalidInput"),
        Refusal::Exists => (409, "BlobAlreadyExists"),
        Refusal::Expired => (401, "InvalidAuthenticationInfo"),
        Refusal::Internal => (500, "InternalError"),
        Refusal::InvalidPart | Refusal::NoUpload => (400, "InvalidBlockList"),
        Refusal::InvalidRange => (416, "InvalidRange"),
        Refusal::NoBucket => (404, "ContainerNotFound"),
        Refusal::NoKey => (404, "BlobNotFound"),
        Refusal::NotImplemented => (501, "NotImplemented"),
        Refusal::SlowDown => (503, "ServerBusy"),
    };
    let body = format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>");
    Answer::new(status, "application/xml", body).with("x-ms-error-code", code)
}
