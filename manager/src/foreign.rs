//! Bytes of files that other libraries wrote, for the package's format modules: headers, and the
//! members of zip archives. Their tensors are read by [`crate::Reader`].

use std::path::Path;
use std::sync::Arc;

use stepwell_core::foreign::Fault;
use stepwell_core::foreign::zip::{self, ZipMember};
use stepwell_core::io::File;

use crate::environment::Environment;
use crate::error::{Error, Result};

/// Local headers of an archive that are not further apart are read together.
const NEAR_BYTES: u64 = 4096;
/// The longest read of local headers.
const MAX_HEADERS_BYTES: u64 = 1 << 20;

/// Reads bytes of a foreign file, as far as it has them. Also returns its length.
pub fn read_foreign(
    path: &Path,
    offset: u64,
    length: usize,
    environment: &Environment,
) -> Result<(Vec<u8>, u64)> {
    let file = open(path, environment)?;
    let file_length = file.len()?;
    // A length that a file names must not decide how much memory is reserved.
    let length = file_length.saturating_sub(offset).min(length as u64);
    Ok((file.read_at(offset, length as usize)?, file_length))
}

/// The members of a zip archive, in the order of its directory, and the offsets of their contents.
pub fn zip_members(path: &Path, environment: &Environment) -> Result<Vec<(ZipMember, u64)>> {
    let file = open(path, environment)?;
    let fault = |fault: Fault| Error::from(stepwell_core::Error::corrupt(path, fault.to_string()));
    let length = file.len()?;
    let tail_at = length.saturating_sub(zip::MAX_TAIL_BYTES);
    let tail = file.read_at(tail_at, (length - tail_at) as usize)?;
    let directory = zip::directory(&tail, length).map_err(fault)?;
    let members = match directory.offset.checked_sub(tail_at) {
        Some(at) => {
            let listed = tail.get(at as usize..).and_then(|rest| rest.get(..directory.length as usize));
            zip::members(listed.unwrap_or_default(), &directory)
        }
        None => zip::members(&file.read_at(directory.offset, directory.length as usize)?, &directory),
    };
    let members = members.map_err(fault)?;
    let headers = local_headers(&*file, &members)?;
    let headers: Vec<&[u8]> = headers.iter().map(Vec::as_slice).collect();
    let contents = zip::contents(&headers, &members, &directory).map_err(fault)?;
    Ok(members.into_iter().zip(contents).collect())
}

/// The bytes of each member's local header up to the end of its name.
fn local_headers(file: &dyn File, members: &[ZipMember]) -> Result<Vec<Vec<u8>>> {
    let mut places: Vec<(u64, u64, usize)> = members
        .iter()
        .enumerate()
        .map(|(number, member)| (member.header, member.header + zip::local_header_bytes(member), number))
        .collect();
    places.sort_unstable();
    let mut headers = vec![Vec::new(); members.len()];
    let mut rest = places.as_slice();
    while let Some(&(first, end, _)) = rest.first() {
        let near = |two: &[(u64, u64, usize)]| match two {
            [(_, end, _), (begin, last, _)] => {
                begin.saturating_sub(*end) <= NEAR_BYTES && last - first <= MAX_HEADERS_BYTES
            }
            _ => false,
        };
        let count = 1 + rest.windows(2).take_while(|two| near(two)).count();
        let (together, later) = rest.split_at(count);
        rest = later;
        let end = together.last().map_or(end, |&(_, end, _)| end);
        let bytes = file.read_at(first, (end - first) as usize)?;
        for &(begin, end, number) in together {
            let found = bytes.get((begin - first) as usize..).unwrap_or_default();
            let found = found.get(..(end - begin) as usize).unwrap_or(found);
            if let Some(header) = headers.get_mut(number) {
                *header = found.to_vec();
            }
        }
    }
    Ok(headers)
}

fn open(path: &Path, environment: &Environment) -> Result<Arc<dyn File>> {
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(parent), Some(name)) = (path.parent(), name) else {
        return Err(Error::Invalid(format!("{} is no path of a file", path.display())));
    };
    Ok(environment.disk.open_dir(parent)?.open_file(name)?)
}
