//! The objects and uploads of all buckets, in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crc_fast::CrcAlgorithm;

use crate::call::{Call, Done, Listing, NamedPart, Page, Refusal};
use crate::encoding::base64;

/// The smallest part of an upload that is not its last.
const SMALLEST_PART: usize = 5 << 20;

/// A stored object.
#[derive(Debug)]
pub struct Object {
    /// Its bytes, in the order of the parts that it was made of.
    pub pieces: Vec<Arc<Vec<u8>>>,
    pub len: u64,
    /// Its ETag, with quotes.
    pub tag: String,
    /// Differs between two objects that were stored.
    pub generation: u64,
    pub modified: SystemTime,
    /// The CRC64NVME of an object that was stored by one request.
    pub checksum: Option<u64>,
}

struct Part {
    bytes: Arc<Vec<u8>>,
    checksum: u64,
}

#[derive(Default)]
struct Upload {
    key: String,
    parts: BTreeMap<String, Part>,
}

#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Arc<Object>>,
    uploads: HashMap<String, Upload>,
}

/// The objects of a server. One lock makes each call atomic.
pub struct Objects {
    buckets: Mutex<HashMap<String, Bucket>>,
    generations: std::sync::atomic::AtomicU64,
    /// Uploads begin with their first part, and have the name of their key (Azure).
    blocks: bool,
}

/// The ETag of a content.
fn tag_of(checksum: u64, len: u64) -> String {
    format!("\"{checksum:016x}{len:x}\"")
}

/// A checksum as headers have it.
pub fn checksum_text(checksum: u64) -> String {
    base64(&checksum.to_be_bytes())
}

impl Objects {
    pub fn new(blocks: bool) -> Self {
        Self { buckets: Mutex::default(), generations: 1.into(), blocks }
    }

    /// Applies a call with its body. `checksum` is what the request says that the body has.
    pub fn apply(
        &self,
        bucket: &str,
        call: &Call,
        body: Arc<Vec<u8>>,
        checksum: Option<&str>,
    ) -> Result<Done, Refusal> {
        if bucket == "nothing" {
            return Err(Refusal::NoBucket);
        }
        let stores = matches!(call, Call::Put { .. } | Call::Part { .. });
        let crc = if stores { crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &body) } else { 0 };
        if stores && checksum.is_some_and(|wanted| wanted != checksum_text(crc)) {
            return Err(Refusal::BadDigest);
        }
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets.entry(bucket.to_owned()).or_default();
        match call {
            Call::Put { key, create } => {
                if *create && bucket.objects.contains_key(key) {
                    return Err(Refusal::Exists);
                }
                let object = self.object(vec![body], Some(crc));
                bucket.objects.insert(key.clone(), Arc::clone(&object));
                Ok(Done::Stored(object))
            }
            Call::Get { key, range } => {
                let object = bucket.objects.get(key).ok_or(Refusal::NoKey)?;
                let range = match range {
                    Some(range) => range.within(object.len).ok_or(Refusal::InvalidRange)?,
                    None => 0..object.len,
                };
                Ok(Done::Found(Arc::clone(object), range))
            }
            Call::Head { key } => {
                let object = bucket.objects.get(key).ok_or(Refusal::NoKey)?;
                Ok(Done::Found(Arc::clone(object), 0..object.len))
            }
            Call::Delete { key } => {
                let found = bucket.objects.remove(key);
                if self.blocks && found.is_none() { Err(Refusal::NoKey) } else { Ok(Done::Deleted) }
            }
            Call::BulkDelete { keys } => {
                let deleted = |key: &String| (key.clone(), bucket.objects.remove(key).is_some());
                Ok(Done::BulkDeleted(keys.iter().map(deleted).collect()))
            }
            Call::List(listing) => Ok(Done::Listed(page(&bucket.objects, listing))),
            Call::StartUpload { key } => {
                let id = format!("upload-{}", self.generation());
                bucket.uploads.insert(id.clone(), Upload { key: key.clone(), ..Upload::default() });
                Ok(Done::Started(id))
            }
            Call::Part { key, upload, part } => {
                if self.blocks {
                    let begun = bucket.uploads.entry(upload.clone()).or_default();
                    begun.key.clone_from(key);
                }
                let found = bucket.uploads.get_mut(upload).filter(|upload| upload.key == *key);
                let found = found.ok_or(Refusal::NoUpload)?;
                let tag = tag_of(crc, body.len() as u64);
                found.parts.insert(part.clone(), Part { bytes: body, checksum: crc });
                Ok(Done::Part { tag, checksum: crc })
            }
            Call::Complete { key, upload, parts, create } => {
                let found = bucket.uploads.get(upload).filter(|upload| upload.key == *key);
                let found = found.ok_or(Refusal::NoUpload)?;
                let pieces = self.pieces(found, parts)?;
                if *create && bucket.objects.contains_key(key) {
                    return Err(Refusal::Exists);
                }
                bucket.uploads.remove(upload);
                let object = self.object(pieces, None);
                bucket.objects.insert(key.clone(), Arc::clone(&object));
                Ok(Done::Stored(object))
            }
            Call::Abort { upload } => match bucket.uploads.remove(upload) {
                Some(_) => Ok(Done::Aborted),
                None => Err(Refusal::NoUpload),
            },
        }
    }

    fn generation(&self) -> u64 {
        self.generations.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    fn object(&self, pieces: Vec<Arc<Vec<u8>>>, checksum: Option<u64>) -> Arc<Object> {
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        let generation = self.generation();
        let tag = match checksum {
            Some(checksum) if !self.blocks => tag_of(checksum, len),
            _ => format!("\"0x{generation:X}\""),
        };
        Arc::new(Object { pieces, len, tag, generation, modified: SystemTime::now(), checksum })
    }

    /// The bytes of the parts that a request names.
    fn pieces(&self, upload: &Upload, named: &[NamedPart]) -> Result<Vec<Arc<Vec<u8>>>, Refusal> {
        let mut pieces = Vec::with_capacity(named.len());
        for part in named {
            let found = upload.parts.get(&part.id).ok_or(Refusal::InvalidPart)?;
            let tag = tag_of(found.checksum, found.bytes.len() as u64);
            let bare = |tag: &str| tag.trim_matches('"').to_owned();
            let same = part.tag.as_deref().is_none_or(|named| bare(named) == bare(&tag))
                && part.checksum.as_deref().is_none_or(|named| named == checksum_text(found.checksum));
            if !same {
                return Err(Refusal::InvalidPart);
            }
            pieces.push(Arc::clone(&found.bytes));
        }
        let (_, all_but_last) = pieces.split_last().ok_or(Refusal::InvalidPart)?;
        if !self.blocks && all_but_last.iter().any(|piece| piece.len() < SMALLEST_PART) {
            return Err(Refusal::EntityTooSmall);
        }
        Ok(pieces)
    }
}

/// Lists one page.
fn page(objects: &BTreeMap<String, Arc<Object>>, listing: &Listing) -> Page {
    let Listing { prefix, delimiter, from, limit } = listing;
    let mut page = Page::default();
    let begin = from.as_ref().map_or(prefix, |from| from.max(prefix));
    for (key, object) in objects.range(begin.clone()..) {
        let Some(rest) = key.strip_prefix(prefix.as_str()) else { break };
        let common = if delimiter.is_empty() { None } else { rest.find(delimiter.as_str()) };
        let common = common.and_then(|end| key.get(..prefix.len() + end + delimiter.len()));
        if common.is_some() && page.prefixes.last().map(String::as_str) == common {
            continue;
        }
        if page.objects.len() + page.prefixes.len() >= *limit {
            page.next = Some(key.clone());
            break;
        }
        match common {
            Some(common) => page.prefixes.push(common.to_owned()),
            None => page.objects.push((key.clone(), Arc::clone(object))),
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_split_a_listing_and_repeat_nothing() {
        let objects = Objects::new(false);
        for key in ["a", "b/1", "b/2", "c", "d/1", "e"] {
            let call = Call::Put { key: key.to_owned(), create: true };
            objects.apply("bucket", &call, Arc::default(), None).unwrap();
        }
        let (mut from, mut found) = (None, Vec::new());
        loop {
            let (prefix, delimiter) = (String::new(), "/".to_owned());
            let call = Call::List(Listing { prefix, delimiter, from, limit: 2 });
            let Ok(Done::Listed(page)) = objects.apply("bucket", &call, Arc::default(), None) else {
                panic!("not a page");
            };
            found.push((page.objects.into_iter().map(|(key, _)| key).collect::<Vec<_>>(), page.prefixes));
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        let owned = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        let wanted = [(vec!["a"], vec!["b/"]), (vec!["c"], vec!["d/"]), (vec!["e"], vec![])];
        assert_eq!(found, wanted.map(|(objects, prefixes)| (owned(&objects), owned(&prefixes))));
    }
}
