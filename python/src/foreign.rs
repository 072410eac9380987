//! Foreign files for the package's format modules: bytes of them, and parsers of these bytes.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use stepwell_core::Error;
use stepwell_core::compression::Compression;
use stepwell_core::foreign::npy::NpyHeader;
use stepwell_core::foreign::ocdbt::OcdbtValue;
use stepwell_core::foreign::zip::{ZipMember, ZipMethod};
use stepwell_core::foreign::{Fault, safetensors};
use stepwell_core::format::checksum;
use stepwell_core::io::{Engine, EntryKind, Purpose, Stat};
use stepwell_manager::{Archive, Environment, ForeignFiles, ForeignReading, StreamPlace};

use crate::errors::{raise, raise_manager};
use crate::location::{self, Location, ObjectRow};
use crate::manager::call;

/// `(name, dtype, shape, offset in the file, bytes)`.
type TensorRow = (String, String, Vec<u64>, u64, u64);

/// Metadata by name, and the tensors.
type HeaderRows = (Vec<(String, String)>, Vec<TensorRow>);

thread_local! {
    /// The readings that this thread has entered, the innermost one last.
    static ENTERED: RefCell<Vec<Entered>> = const { RefCell::new(Vec::new()) };
}

/// A reading, for the thread that has entered it.
#[derive(Clone, Default)]
pub struct Entered {
    /// The known facts about its files.
    pub reading: Arc<ForeignReading>,
    /// The store that has them.
    store: Option<Arc<EnteredStore>>,
}

/// A store with foreign files.
struct EnteredStore {
    location: Location,
    /// The package's list of its objects.
    objects: Py<PyAny>,
    /// The same list, for the engine.
    listed: Arc<HashMap<PathBuf, Stat>>,
}

impl EnteredStore {
    fn of(objects: Bound<'_, PyAny>) -> PyResult<Self> {
        let location = objects.getattr("url")?.extract()?;
        let stamps: HashMap<PathBuf, (u64, i64, u64)> = objects.getattr("stamps")?.extract()?;
        let stat = |(path, (len, modified, number))| {
            let id = (0, number);
            (path, Stat { kind: EntryKind::File, len, id, changed: modified, modified })
        };
        let listed = Arc::new(stamps.into_iter().map(stat).collect());
        Ok(Self { location, objects: objects.unbind(), listed })
    }
}

impl Entered {
    /// Returns the environment of a path.
    pub fn environment(
        &self,
        path: &Path,
        engine: Engine,
        purpose: Purpose,
    ) -> Result<Environment, stepwell_manager::Error> {
        match &self.store {
            Some(store) => store.location.environment(engine, purpose),
            None => location::of_path(path, engine, purpose),
        }
    }
}

/// One reading of another library's checkpoint: what is known of its files. Files that are read in
/// its `with` statement belong to it.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Reading(pub Entered);

#[pymethods]
impl Reading {
    /// `objects` lists a store that has the files: its location `url`, and the `stamps` of all
    /// objects (bytes, time, number of the content) by their URLs.
    #[new]
    #[pyo3(signature = (objects = None))]
    fn new(objects: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(objects) = objects else { return Ok(Self(Entered::default())) };
        let store = match entered().store {
            Some(store) if store.objects.is(&objects) => store,
            _ => Arc::new(EnteredStore::of(objects)?),
        };
        let reading = Arc::new(ForeignReading::of_objects(Arc::clone(&store.listed)));
        Ok(Self(Entered { reading, store: Some(store) }))
    }

    /// From now on, reads of the file are checked. `crcs` has the CRC-32C of each block: four bytes
    /// each, the least significant one first.
    fn adopt(
        &self,
        py: Python<'_>,
        path: PathBuf,
        block_bytes: u64,
        length: u64,
        crcs: &[u8],
    ) -> PyResult<()> {
        let (words, rest) = crcs.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(PyValueError::new_err("a checksum has four bytes"));
        }
        let crcs = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        self.0.reading.adopt(path, block_bytes, length, crcs).map_err(|error| raise_manager(py, &error))
    }

    fn __enter__(&self) {
        ENTERED.with_borrow_mut(|entered| entered.push(self.0.clone()));
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        ENTERED.with_borrow_mut(|entered| {
            let is_this = |one: &Entered| Arc::ptr_eq(&one.reading, &self.0.reading);
            if let Some(at) = entered.iter().rposition(is_this) {
                entered.remove(at);
            }
        });
    }
}

/// Returns the reading that this thread is in. Without one, it is new.
pub fn entered() -> Entered {
    ENTERED.with_borrow(|entered| entered.last().cloned()).unwrap_or_default()
}

/// Returns the list of objects of the reading that this thread is in. `None`: its files are on a
/// disk.
#[pyfunction]
pub fn entered_objects(py: Python<'_>) -> Option<Py<PyAny>> {
    ENTERED.with_borrow(|entered| Some(entered.last()?.store.as_ref()?.objects.clone_ref(py)))
}

/// Lists the objects below a URL: see [`Location::objects`].
#[pyfunction]
pub fn stored_objects(py: Python<'_>, url: Location) -> PyResult<Vec<ObjectRow>> {
    call(py, move || url.objects())
}

/// Reads a file, or several ones, with the disk of a path or the store of the entered reading.
pub fn read<T: Send + 'static>(
    py: Python<'_>,
    path: PathBuf,
    work: impl FnOnce(&Path, &ForeignFiles) -> Result<T, stepwell_manager::Error> + Send + 'static,
) -> PyResult<T> {
    let entered = entered();
    call(py, move || {
        let environment = entered.environment(&path, Engine::Auto, Purpose::Read)?;
        work(&path, &ForeignFiles::new(environment.disk, entered.reading))
    })
}

/// Reads bytes of a file, as far as it has them. Also returns its length.
#[pyfunction]
pub fn read_foreign(
    py: Python<'_>,
    path: PathBuf,
    offset: u64,
    length: usize,
) -> PyResult<(Bound<'_, PyBytes>, u64)> {
    let (bytes, file_length) =
        read(py, path, move |path, files| stepwell_manager::read_foreign(path, offset, length, files))?;
    Ok((PyBytes::new(py, &bytes), file_length))
}

/// Reads bytes of several files, as far as these have them.
#[pyfunction]
pub fn read_foreign_ranges(
    py: Python<'_>,
    ranges: Vec<(PathBuf, u64, usize)>,
) -> PyResult<Vec<Bound<'_, PyBytes>>> {
    let Some((first, ..)) = ranges.first() else { return Ok(Vec::new()) };
    let first = first.clone();
    let contents = read(py, first, move |_, files| stepwell_manager::read_foreign_ranges(&ranges, files))?;
    Ok(contents.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
}

/// Returns the length of the header of a safetensors file of that length. The header follows the
/// first eight bytes, `start`.
#[pyfunction]
pub fn safetensors_header_length(
    py: Python<'_>,
    path: PathBuf,
    start: &[u8],
    file_length: u64,
) -> PyResult<u64> {
    let too_short = || Fault::cut(0, "a safetensors file has eight bytes or more");
    let length = start
        .first_chunk()
        .ok_or_else(too_short)
        .and_then(|&start| safetensors::header_length(start, file_length));
    length.map_err(|fault| corrupt(py, &path, &fault))
}

/// Parses the header of a safetensors file of that length. Returns the entries of its metadata, and
/// its tensors in the order of their bytes.
#[pyfunction]
pub fn safetensors_header(
    py: Python<'_>,
    path: PathBuf,
    header: &[u8],
    file_length: u64,
) -> PyResult<HeaderRows> {
    let header = safetensors::parse(header, file_length).map_err(|fault| corrupt(py, &path, &fault))?;
    let row = |one: safetensors::SafetensorsEntry| (one.name, one.dtype, one.shape, one.offset, one.length);
    Ok((header.metadata, header.tensors.into_iter().map(row).collect()))
}

/// A member of a zip archive: `(name, method, CRC-32 if the archive has any, stored bytes, bytes)`.
/// A method is `stored` or `deflated`.
type MemberRow = (String, &'static str, Option<u32>, u64, u64);

/// The directory of a file that is a zip archive.
#[pyclass(frozen, module = "stepwell._core")]
pub struct ZipDirectory(Arc<stepwell_manager::ZipDirectory>);

#[pymethods]
impl ZipDirectory {
    #[new]
    fn of(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let found = read(py, path, stepwell_manager::ZipDirectory::read)?;
        Ok(Self(Arc::new(found)))
    }

    /// Returns the members, in the order of the directory.
    fn members(&self) -> Vec<MemberRow> {
        self.0.members().iter().map(member_row).collect()
    }

    /// Reads the offsets of the contents of the members with these numbers.
    fn contents(&self, py: Python<'_>, numbers: Vec<usize>) -> PyResult<Vec<u64>> {
        let directory = Arc::clone(&self.0);
        let path = directory.path().to_owned();
        read(py, path, move |_, files| directory.contents(&numbers, files))
    }
}

fn member_row(one: &ZipMember) -> MemberRow {
    let method = match one.method {
        ZipMethod::Stored => "stored",
        ZipMethod::Deflated => "deflated",
    };
    (one.name.clone(), method, one.crc, one.stored_length, one.length)
}

/// An archive: its members, the offsets of their contents, and some of the contents by number.
type ArchiveRow<'py> = (Vec<MemberRow>, Vec<u64>, Vec<(usize, Bound<'py, PyBytes>)>);

/// The zip archives at these places of a file (offset, length). Returns the contents of their short
/// members whose names end with one of `wanted`.
#[pyfunction]
pub fn zip_archives(
    py: Python<'_>,
    path: PathBuf,
    places: Vec<(u64, u64)>,
    wanted: Vec<String>,
) -> PyResult<Vec<ArchiveRow<'_>>> {
    let found = read(py, path, move |path, files| {
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        stepwell_manager::archives(path, &places, &wanted, files)
    })?;
    Ok(archive_rows(py, found))
}

/// The zip archives that are compressed streams at these places of a file (offset, length), as far
/// as their first `head` bytes show them. Offsets are those in the decoded archive. A member that
/// does not end there has a length of 2^62. Contents as in `zip_archives`.
#[pyfunction]
pub fn compressed_archives<'py>(
    py: Python<'py>,
    path: PathBuf,
    places: Vec<(u64, u64)>,
    compression: &str,
    wanted: Vec<String>,
    head: u64,
) -> PyResult<Vec<ArchiveRow<'py>>> {
    let compression = compression_named(compression)?;
    let found = read(py, path, move |path, files| {
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        stepwell_manager::compressed_archives(path, &places, compression, &wanted, head, files)
    })?;
    Ok(archive_rows(py, found))
}

fn archive_rows(py: Python<'_>, found: Vec<Archive>) -> Vec<ArchiveRow<'_>> {
    let row = |one: Archive| {
        let records = one.records.into_iter().map(|(number, bytes)| (number, PyBytes::new(py, &bytes)));
        let (members, contents): (Vec<_>, Vec<_>) =
            one.members.iter().map(|(member, content)| (member_row(member), *content)).unzip();
        (members, contents, records.collect())
    };
    found.into_iter().map(row).collect()
}

/// An entry of an OCDBT database: key, value, and without one its place: number of the file,
/// offset, bytes.
type OcdbtRow<'py> = (String, Option<Bound<'py, PyBytes>>, Option<(usize, u64, u64)>);

/// The data files of the OCDBT database in a directory, by their paths below it, and its entries.
#[pyfunction]
pub fn ocdbt_entries(py: Python<'_>, path: PathBuf) -> PyResult<(Vec<String>, Vec<OcdbtRow<'_>>)> {
    let entries = read(py, path.clone(), stepwell_manager::ocdbt_entries)?;
    let (mut files, mut numbers) = (Vec::new(), HashMap::new());
    let mut row = |(key, value): (Vec<u8>, OcdbtValue)| {
        let key = String::from_utf8(key).map_err(|_| {
            raise(py, &Error::corrupt(path.clone(), "a key of its OCDBT database is no UTF-8"))
        })?;
        Ok(match value {
            OcdbtValue::Inline(bytes) => (key, Some(PyBytes::new(py, &bytes)), None),
            OcdbtValue::At(place) => {
                let number = *numbers.entry(Arc::clone(&place.path)).or_insert_with(|| {
                    files.push(place.path.to_string());
                    files.len() - 1
                });
                (key, None, Some((number, place.offset, place.length)))
            }
        })
    };
    let rows = entries.into_iter().map(&mut row).collect::<PyResult<_>>()?;
    Ok((files, rows))
}

/// The CRC-32C of bytes.
#[pyfunction]
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum::crc32c(bytes)
}

/// The compression of that name.
pub fn compression_named(name: &str) -> PyResult<Compression> {
    match name {
        "deflate" => Ok(Compression::Deflate),
        "zstd" => Ok(Compression::Zstd),
        "latin1" => Ok(Compression::Latin1),
        "stored" => Ok(Compression::Stored),
        other => Err(PyValueError::new_err(format!("compression {other:?}"))),
    }
}

/// The place of a numpy array in a file: name, offset, bytes in the file, compression.
type NpyPlaceRow = (String, u64, u64, Option<String>);

/// The header of a numpy array: dtype (`None`: structured), Fortran order, shape, bytes of the
/// header.
type NpyRow = (Option<String>, bool, Vec<u64>, u64);

/// The headers of numpy arrays in a file.
#[pyfunction]
pub fn npy_headers(py: Python<'_>, path: PathBuf, places: Vec<NpyPlaceRow>) -> PyResult<Vec<NpyRow>> {
    let place = |(name, offset, length, compression): NpyPlaceRow| {
        let compression = compression.map(|name| compression_named(&name)).transpose()?;
        Ok::<_, PyErr>(StreamPlace { name, offset, length, compression })
    };
    let places = places.into_iter().map(place).collect::<PyResult<Vec<_>>>()?;
    let headers = read(py, path, move |path, files| stepwell_manager::npy_headers(path, &places, files))?;
    let row = |one: NpyHeader| (one.descr, one.fortran_order, one.shape, one.length);
    Ok(headers.into_iter().map(row).collect())
}

pub fn corrupt(py: Python<'_>, path: &Path, fault: &Fault) -> PyErr {
    raise(py, &Error::corrupt(path, fault.to_string()))
}
