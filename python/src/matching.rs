//! Converts wanted leaves from Python, and the report to Python.

use std::collections::{HashMap, HashSet};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::region::Region;
use stepwell_core::tree::ContainerKind;
use stepwell_reshard::glob::GlobList;
use stepwell_reshard::layout::{self, Place, Segment};
use stepwell_reshard::matching::{
    Cast, Dropped, MatchOptions, Missing, OnMissing, OnUnexpected, PerGlob, Report, Resize, Spec, StoredSpec,
    Wanted,
};
use stepwell_reshard::selection::{Renames, Selection};

use crate::array_group::{self, ArrayGroup, Candidates, Groups};
use crate::checkpoint::Checkpoint;
use crate::errors::invalid;
use crate::hooks::dtype_named;

/// Components, kind, dtype, shape, whether the caller has a value there.
type WantedRow<'py> =
    (Bound<'py, PyTuple>, Bound<'py, PyString>, Option<Bound<'py, PyString>>, Option<Vec<u64>>, bool);

/// Converts `(tag, value)`.
pub fn component_of(row: &Bound<'_, PyAny>) -> PyResult<Component> {
    let (tag, value): (Bound<'_, PyString>, Bound<'_, PyAny>) = row.extract()?;
    let name = || Ok::<_, PyErr>(value.cast::<PyString>()?.to_str()?.into());
    Ok(match tag.to_str()? {
        "k" => Component::Key(name()?),
        "i" => Component::Int(value.extract()?),
        "x" => Component::Index(value.extract()?),
        "f" => Component::Field(name()?),
        other => return Err(PyValueError::new_err(format!("a component with the tag {other:?}"))),
    })
}

fn wanted_row(row: &Bound<'_, PyAny>) -> PyResult<Wanted> {
    let (components, kind, dtype, shape, holds_value): WantedRow<'_> = row.extract()?;
    let spec = match kind.to_str()? {
        "tensor" => {
            let dtype = dtype.map(|name| dtype_named(name.to_str()?)).transpose()?;
            Spec::Tensor { dtype, shape }
        }
        "object" => Spec::Object,
        "any" => Spec::Any,
        "skip" => Spec::Skip,
        other => return Err(PyValueError::new_err(format!("a wanted {other:?}"))),
    };
    let path = LeafPath(components.iter().map(|row| component_of(&row)).collect::<PyResult<_>>()?);
    Ok(Wanted { path, spec, holds_value })
}

/// A choice for all leaves, or per glob.
fn choice<T: Copy + Default>(
    value: &Bound<'_, PyAny>,
    named: impl Fn(&str) -> PyResult<T>,
) -> PyResult<PerGlob<T>> {
    if value.is_none() {
        return Ok(PerGlob::everywhere(T::default()));
    }
    if let Ok(table) = value.cast::<PyDict>() {
        let mut rules = Vec::with_capacity(table.len());
        for (glob, one) in table.iter() {
            rules.push((glob.extract::<String>()?, named(&one.extract::<String>()?)?));
        }
        return PerGlob::new(rules, T::default()).map_err(|error| invalid(value.py(), &error.to_string()));
    }
    Ok(PerGlob::everywhere(named(&value.extract::<String>()?)?))
}

fn unknown<T>(name: &str) -> PyResult<T> {
    Err(PyValueError::new_err(format!("no such choice: {name:?}")))
}

fn options(given: &Bound<'_, PyDict>, top_level: &Bound<'_, PyList>) -> PyResult<MatchOptions> {
    let py = given.py();
    let get =
        |name: &str| given.get_item(name).map(|found| found.unwrap_or_else(|| py.None().into_bound(py)));
    let wrong = |error: stepwell_reshard::Error| invalid(py, &error.to_string());
    let include: Option<Vec<String>> = get("include")?.extract()?;
    let exclude: Option<Vec<String>> = get("exclude")?.extract()?;
    let rename: Vec<(String, String)> = get("rename")?.extract()?;
    Ok(MatchOptions {
        selection: Selection::new(include.as_deref(), &exclude.unwrap_or_default()).map_err(wrong)?,
        renames: Renames::new(rename).map_err(wrong)?,
        missing: choice(&get("missing")?, |name| match name {
            "error" => Ok(OnMissing::Error),
            "keep" => Ok(OnMissing::Keep),
            other => unknown(other),
        })?,
        unexpected: choice(&get("unexpected")?, |name| match name {
            "error" => Ok(OnUnexpected::Error),
            "ignore" => Ok(OnUnexpected::Ignore),
            other => unknown(other),
        })?,
        cast: choice(&get("cast")?, |name| match name {
            "exact" => Ok(Cast::Exact),
            "lossless" => Ok(Cast::Lossless),
            "lossy" => Ok(Cast::Lossy),
            other => Ok(Cast::To(dtype_named(other)?)),
        })?,
        resize: choice(&get("resize")?, |name| match name {
            "pad" => Ok(Resize::Pad),
            "keep" => Ok(Resize::Keep),
            "truncate" => Ok(Resize::Truncate),
            "both" => Ok(Resize::Both),
            other => unknown(other),
        })?,
        whole: get("whole")?.extract()?,
        top_level: top_level.iter().map(|row| component_of(&row)).collect::<PyResult<_>>()?,
        dropped: get("dropped")?
            .extract::<Option<Vec<(String, String)>>>()?
            .unwrap_or_default()
            .into_iter()
            .map(|(item, when)| Dropped { item, when })
            .collect(),
        elsewhere: get("elsewhere")?.extract::<Option<HashSet<usize>>>()?.unwrap_or_default(),
    })
}

/// Matches what is wanted against what is stored; nothing is read. See `_restore/wanted.py` for the
/// rows.
#[pyfunction]
pub fn match_state<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    rows: &Bound<'py, PyList>,
    top_level: &Bound<'py, PyList>,
    given: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyDict>> {
    let inner = checkpoint.get(py)?;
    let stored_rows: Vec<usize> =
        given.get_item("groupable")?.map_or(Ok(Vec::new()), |rows| rows.extract())?;
    let mut candidates: Candidates<'_> = stored_rows.into_iter().map(|row| (row..row + 1, None)).collect();
    let mut wanted = Vec::with_capacity(rows.len());
    for row in rows.iter() {
        match row.cast::<ArrayGroup>() {
            Ok(group) => candidates.push(array_group::candidate(group, &mut wanted)),
            Err(_) => wanted.push(wanted_row(&row)?),
        }
    }
    let mut options = options(given, top_level)?;
    // Entries may be absent from the top where they have names.
    options.whole |= !inner.tree().nodes().first().is_none_or(|root| match root.container() {
        Some(kind) => has_names(kind),
        None => false,
    });
    let report = py.detach(|| inner.match_state(&wanted, &options));
    let shape = |stored: usize| match inner.leaves().get(stored).map(|leaf| &leaf.spec) {
        Some(StoredSpec::Tensor { shape, .. }) => &shape[..],
        _ => &[],
    };
    let groups = array_group::settle(py, candidates, &report, &wanted, inner.tree())?;
    rendered(py, &report, shape, groups)
}

/// True if a container's entries have names, not places.
fn has_names(kind: &ContainerKind) -> bool {
    match kind {
        ContainerKind::List | ContainerKind::Tuple | ContainerKind::Deque { .. } => false,
        ContainerKind::Stateful { inner, .. } => has_names(inner),
        _ => true,
    }
}

/// Stored and wanted dtype, stored and wanted shape, whether the rest keeps the caller's values.
type Conversion<'a> = (Dtype, Dtype, &'a [u64], &'a [u64], bool);

fn rendered<'py, 'a>(
    py: Python<'py>,
    report: &'a Report,
    shape: impl Fn(usize) -> &'a [u64],
    groups: Option<Groups<'py>>,
) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("text", report.to_string())?;
    // Many thousand leaves have a few dtypes and shapes.
    let mut conversions: HashMap<Conversion<'_>, usize> = HashMap::new();
    let mut rows = Vec::new();
    out.set_item("ok", report.is_ok() && groups.is_some())?;
    let mut groups = groups.into_iter().flatten().peekable();
    let mut at = 0;
    while let Some(found) = report.matches.get(at) {
        at += 1;
        if let Some((range, group)) = groups.next_if(|(range, _)| range.start + 1 == at) {
            at = range.end;
            rows.push((found.wanted, found.stored, found.source, group.into_any()));
            continue;
        }
        let which = found.tensor.as_ref().map(|tensor| {
            let next = conversions.len();
            let stored = shape(found.source);
            let conversion =
                (tensor.stored_dtype, tensor.dtype, stored, tensor.shape.as_slice(), tensor.keeps);
            *conversions.entry(conversion).or_insert(next)
        });
        rows.push((found.wanted, found.stored, found.source, which.into_pyobject(py)?));
    }
    out.set_item("matches", rows)?;
    let mut conversions: Vec<_> = conversions.into_iter().collect();
    conversions.sort_unstable_by_key(|&(_, number)| number);
    let conversions = conversions.into_iter().map(|((stored_dtype, dtype, stored, wanted, keeps), _)| {
        let shapes = (PyTuple::new(py, stored)?, PyTuple::new(py, wanted)?);
        Ok((stored_dtype.name(), dtype.name(), shapes.0, shapes.1, keeps))
    });
    out.set_item("conversions", conversions.collect::<PyResult<Vec<_>>>()?)?;
    out.set_item("kept", report.kept.iter().map(|kept| kept.wanted).collect::<Vec<_>>())?;
    out.set_item("ignored", &report.ignored)?;
    let left_out = [&report.skipped, &report.not_wanted, &report.deselected];
    out.set_item("left_out", left_out.into_iter().flatten().copied().collect::<Vec<_>>())?;
    let unmatched = report
        .unmatched
        .iter()
        .map(|one| (one.option, one.glob.clone(), one.near.clone(), one.fails))
        .collect::<Vec<_>>();
    out.set_item("unmatched", unmatched)?;
    out.set_item("idle_renames", &report.idle_renames)?;
    let missing = report.missing.iter().map(|leaf| {
        let why = match leaf.reason {
            Missing::NotStored => "not stored",
            Missing::Deselected => "left out by include/exclude",
            Missing::NothingToKeep => "nothing to keep",
            Missing::Dropped(_) => "dropped by thinning",
        };
        (leaf.path.clone(), why, leaf.near.clone())
    });
    out.set_item("missing", missing.collect::<Vec<_>>())?;
    let unexpected =
        report.unexpected.iter().map(|leaf| (leaf.path.clone(), leaf.renamed.clone(), leaf.near.clone()));
    out.set_item("unexpected", unexpected.collect::<Vec<_>>())?;
    let numbers = report.unexpected.iter().map(|leaf| leaf.stored);
    out.set_item("unexpected_leaves", numbers.collect::<Vec<_>>())?;
    let shapes = report
        .wrong_shape
        .iter()
        .map(|leaf| (leaf.path.clone(), leaf.stored_shape.clone(), leaf.wanted_shape.clone()));
    out.set_item("wrong_shape", shapes.collect::<Vec<_>>())?;
    let name = |dtype: Dtype| dtype.name();
    let dtypes = report
        .wrong_dtype
        .iter()
        .map(|leaf| (leaf.path.clone(), name(leaf.stored_dtype), name(leaf.wanted_dtype), leaf.why));
    out.set_item("wrong_dtype", dtypes.collect::<Vec<_>>())?;
    let kinds = report.wrong_kind.iter().map(|leaf| (leaf.path.clone(), leaf.stored_kind, leaf.wanted_kind));
    out.set_item("wrong_kind", kinds.collect::<Vec<_>>())?;
    let collisions = report.collisions.iter().map(|leaf| (leaf.path.clone(), leaf.stored_paths.clone()));
    out.set_item("collisions", collisions.collect::<Vec<_>>())?;
    Ok(out)
}

/// The wanted paths that renames give to stored ones; `None` where no rule applies.
#[pyfunction]
pub fn renamed(
    py: Python<'_>,
    rules: Vec<(String, String)>,
    paths: Vec<String>,
) -> PyResult<Vec<Option<String>>> {
    let wrong = |error: stepwell_reshard::Error| invalid(py, &error.to_string());
    let renames = Renames::new(rules).map_err(wrong)?;
    paths.iter().map(|path| renames.apply_rendered(path).map_err(wrong)).collect()
}

/// The number of the first glob that matches each path, or a subtree above it; `None` where none
/// does.
#[pyfunction]
pub fn first_globs(py: Python<'_>, globs: Vec<String>, paths: Vec<String>) -> PyResult<Vec<Option<usize>>> {
    let wrong = |error: stepwell_reshard::Error| invalid(py, &error.to_string());
    let globs = GlobList::new(globs).map_err(wrong)?;
    paths.iter().map(|path| globs.first_match_rendered(path).map_err(wrong)).collect()
}

/// A part of a parameter that a process holds: offset and extent in the tensor, then the first
/// element and the steps in the parameter's own array.
type PieceRow = (Vec<u64>, Vec<u64>, u64, Vec<i64>);

/// Returns the part `start .. start + len` of a process's flattened parameter as boxes of the
/// tensor, each with its place in the run, in elements. The parameter has that local shape and
/// holds these pieces. `None` if the run exceeds it, or a piece is not aligned with its dimensions.
#[pyfunction]
pub fn flat_pieces(local: Vec<u64>, pieces: Vec<PieceRow>, start: u64, len: u64) -> Option<Vec<PieceRow>> {
    let segments = pieces.into_iter().map(|(offset, extent, at, steps)| Segment {
        region: Region { offset: offset.into(), extent: extent.into() },
        place: Place { offset: at, strides: steps.into() },
    });
    let flat = layout::flat(&segments.collect::<Vec<_>>(), &local, 1, start, len, 0)?;
    let row = |Segment { region, place }| {
        let Place { offset, strides } = place;
        (region.offset.to_vec(), region.extent.to_vec(), offset, strides.to_vec())
    };
    Some(flat.into_iter().map(row).collect())
}
