//! The interface of S3, and the XML API of Google Cloud Storage, which has the same shapes.

use crate::call::{Call, Done, Listing, NamedPart, Page, Range, Refusal};
use crate::encoding::{element, elements, http_date, iso_date, text_of};
use crate::http::{Answer, Body, Request};
use crate::objects::{Object, checksum_text};
use crate::server::{Asked, Dialect};

/// The header with the CRC64NVME of a body.
pub const CHECKSUM: &str = "x-amz-checksum-crc64nvme";
/// The most entries of a page.
const PAGE: usize = 1000;
/// The most parts of an upload.
const MAX_PARTS: u32 = 10_000;

/// Parses a request.
pub fn parsed(request: &Request) -> Result<Asked, Refusal> {
    let (bucket, key) = request.bucket_and_key().ok_or(Refusal::Malformed)?;
    let is_streamed = |sha: &str| sha.starts_with("STREAMING");
    if bucket.is_empty() {
        return Err(Refusal::Malformed);
    }
    if request.header("if-match").is_some() || request.header("x-amz-content-sha256").is_some_and(is_streamed)
    {
        return Err(Refusal::NotImplemented);
    }
    let create = request.header("if-none-match") == Some("*")
        || request.header("x-goog-if-generation-match") == Some("0");
    let has = |name| request.parameter(name).is_some();
    let upload = request.parameter("uploadId").map(str::to_owned);
    let call = match (request.method.as_str(), key.is_empty(), upload) {
        ("GET", true, None) => Call::List(listing(request)?),
        ("POST", true, None) if has("delete") => Call::BulkDelete { keys: deleted(request)? },
        (_, true, _) => return Err(Refusal::NotImplemented),
        ("PUT", _, Some(upload)) => Call::Part { key, upload, part: part(request)? },
        ("POST", _, Some(upload)) => Call::Complete { key, upload, parts: completed(request)?, create },
        ("DELETE", _, Some(upload)) => Call::Abort { upload },
        ("POST", _, None) if has("uploads") => Call::StartUpload { key },
        ("PUT", _, None) => Call::Put { key, create },
        ("GET", _, None) => {
            let range = request.header("range").map(|range| Range::parse(range).ok_or(Refusal::Malformed));
            Call::Get { key, range: range.transpose()? }
        }
        ("HEAD", _, None) => Call::Head { key },
        ("DELETE", _, None) => Call::Delete { key },
        _ => return Err(Refusal::NotImplemented),
    };
    Ok(Asked { bucket, call })
}

fn listing(request: &Request) -> Result<Listing, Refusal> {
    if request.parameter("list-type") != Some("2") {
        return Err(Refusal::NotImplemented);
    }
    let text = |name| request.parameter(name).map(str::to_owned);
    let limit = request.parameter("max-keys").map(|limit| limit.parse().map_err(|_| Refusal::Malformed));
    let after = text("start-after").map(|after| format!("{after}\0"));
    Ok(Listing {
        prefix: text("prefix").unwrap_or_default(),
        delimiter: text("delimiter").unwrap_or_default(),
        from: text("continuation-token").or(after),
        limit: limit.transpose()?.unwrap_or(PAGE).min(PAGE),
    })
}

fn deleted(request: &Request) -> Result<Vec<String>, Refusal> {
    let body = request.text().ok_or(Refusal::Malformed)?;
    let keys: Option<Vec<String>> =
        elements(body, "Object").iter().map(|object| text_of(object, "Key")).collect();
    keys.filter(|keys| !keys.is_empty() && keys.len() <= PAGE).ok_or(Refusal::Malformed)
}

fn part(request: &Request) -> Result<String, Refusal> {
    let number = request.parameter("partNumber").and_then(|number| number.parse::<u32>().ok());
    let number = number.filter(|number| (1..=MAX_PARTS).contains(number)).ok_or(Refusal::Malformed)?;
    Ok(number.to_string())
}

fn completed(request: &Request) -> Result<Vec<NamedPart>, Refusal> {
    let body = request.text().ok_or(Refusal::Malformed)?;
    let part = |part: &&str| {
        let (tag, checksum) = (text_of(part, "ETag"), text_of(part, "ChecksumCRC64NVME"));
        Some(NamedPart { id: text_of(part, "PartNumber")?, tag, checksum })
    };
    let parts: Option<Vec<NamedPart>> = elements(body, "Part").iter().map(part).collect();
    parts.filter(|parts| !parts.is_empty()).ok_or(Refusal::Malformed)
}

fn xml(status: u16, text: &str) -> Answer {
    let mut body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    body.push_str(text);
    Answer::new(status, "application/xml", body)
}

/// Adds the facts of an object.
fn described(answer: Answer, object: &Object, dialect: Dialect) -> Answer {
    let answer = answer.with("ETag", &object.tag).with("Last-Modified", http_date(object.modified));
    match dialect {
        Dialect::Google => answer.with("x-goog-generation", object.generation.to_string()),
        _ => answer,
    }
}

/// Answers a call that succeeded. `checked` is true if the request had a checksum.
pub fn answer(asked: &Asked, done: Done, dialect: Dialect, checked: bool) -> Answer {
    let checksum = |answer: Answer, checksum: Option<u64>| match checksum {
        Some(checksum) if checked => answer.with(CHECKSUM, checksum_text(checksum)),
        _ => answer,
    };
    match (done, &asked.call) {
        (Done::Stored(object), Call::Complete { key, .. }) => {
            let mut body = "<CompleteMultipartUploadResult>".to_owned();
            element(&mut body, "Bucket", &asked.bucket);
            element(&mut body, "Key", key);
            element(&mut body, "ETag", &object.tag);
            body.push_str("</CompleteMultipartUploadResult>");
            described(xml(200, &body), &object, dialect)
        }
        (Done::Stored(object), _) => {
            checksum(described(Answer::empty(200), &object, dialect), object.checksum)
        }
        (Done::Found(object, range), call) => {
            let is_range = matches!(call, Call::Get { range: Some(_), .. });
            found(&object, range, is_range, dialect)
        }
        (Done::Deleted | Done::Aborted, _) => Answer::empty(204),
        (Done::BulkDeleted(keys), _) => {
            let mut body = "<DeleteResult>".to_owned();
            for (key, _) in keys {
                body.push_str("<Deleted>");
                element(&mut body, "Key", &key);
                body.push_str("</Deleted>");
            }
            body.push_str("</DeleteResult>");
            xml(200, &body)
        }
        (Done::Listed(page), _) => xml(200, &listed(&page)),
        (Done::Started(id), _) => {
            let mut body = "<InitiateMultipartUploadResult>".to_owned();
            element(&mut body, "UploadId", &id);
            body.push_str("</InitiateMultipartUploadResult>");
            xml(200, &body)
        }
        (Done::Part { tag, checksum: found }, _) => {
            checksum(Answer::empty(200).with("ETag", tag), Some(found))
        }
    }
}

fn found(object: &Object, range: std::ops::Range<u64>, is_range: bool, dialect: Dialect) -> Answer {
    let mut answer = described(Answer::empty(200), object, dialect).with("Accept-Ranges", "bytes");
    if is_range {
        let last = range.end.saturating_sub(1);
        answer = answer.with("Content-Range", format!("bytes {}-{last}/{}", range.start, object.len));
        answer.status = 206;
    }
    answer.body = Body::Pieces(object.pieces.clone(), range);
    answer
}

fn listed(page: &Page) -> String {
    let mut body = "<ListBucketResult>".to_owned();
    for (key, object) in &page.objects {
        body.push_str("<Contents>");
        element(&mut body, "Key", key);
        element(&mut body, "Size", &object.len.to_string());
        element(&mut body, "LastModified", &iso_date(object.modified));
        element(&mut body, "ETag", &object.tag);
        body.push_str("</Contents>");
    }
    for prefix in &page.prefixes {
        body.push_str("<CommonPrefixes>");
        element(&mut body, "Prefix", prefix);
        body.push_str("</CommonPrefixes>");
    }
    element(&mut body, "IsTruncated", if page.next.is_some() { "true" } else { "false" });
    if let Some(next) = &page.next {
        element(&mut body, "NextContinuationToken", next);
    }
    body.push_str("</ListBucketResult>");
    body
}

/// Answers that the bucket is in another region.
pub fn redirected(region: &str, bucket: &str) -> Answer {
    let mut body = "<Error><Code>PermanentRedirect</Code>".to_owned();
    element(&mut body, "Bucket", bucket);
    body.push_str("</Error>");
    xml(301, &body).with("x-amz-bucket-region", region)
}

/// Answers a call that failed.
pub fn refused(refusal: Refusal, dialect: Dialect) -> Answer {
    let (status, code) = match refusal {
        Refusal::BadDigest => (400, "BadDigest"),
        Refusal::Busy => (429, "TooManyRequests"),
        Refusal::Conflict => (409, "ConditionalRequestConflict"),
        Refusal::Denied => (403, "AccessDenied"),
        Refusal::EntityTooSmall => (400, "EntityTooSmall"),
        Refusal::Exists => (412, "PreconditionFailed"),
        Refusal::Expired if dialect == Dialect::Google => (401, "AuthenticationRequired"),
        Refusal::Expired => (400, "ExpiredToken"),
        Refusal::Internal => (500, "InternalError"),
        Refusal::InvalidPart => (400, "InvalidPart"),
        Refusal::InvalidRange => (416, "InvalidRange"),
        Refusal::Malformed => (400, "InvalidRequest"),
        Refusal::NoBucket => (404, "NoSuchBucket"),
        Refusal::NoKey => (404, "NoSuchKey"),
        Refusal::NoUpload => (404, "NoSuchUpload"),
        Refusal::NotImplemented => (501, "NotImplemented"),
        Refusal::SlowDown => (503, "SlowDown"),
    };
    xml(status, &format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>"))
}
