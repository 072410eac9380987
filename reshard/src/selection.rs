//! Which stored leaves a restore looks at, and under which names: include and exclude globs over
//! stored paths, then renames from stored to wanted. Used by [`crate::matching`]; the dialect of
//! the globs is that of [`crate::glob`].

pub use crate::glob::escape;
use crate::glob::{Glob, GlobList, Wildcard, render};
use crate::{Error, Result};

/// Include and exclude. A leaf is selected when an include matches it or a subtree above it (or
/// there are none) and no exclude does.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    include: Option<GlobList>,
    exclude: GlobList,
}

impl Selection {
    /// Selects everything.
    pub fn all() -> Self {
        Self::default()
    }

    /// `include: None` selects everything that is not excluded; an empty list selects nothing.
    pub fn new<S: AsRef<str>>(include: Option<&[S]>, exclude: &[S]) -> Result<Self> {
        let list = |globs: &[S]| GlobList::new(globs.iter().map(AsRef::as_ref));
        Ok(Self { include: include.map(list).transpose()?, exclude: list(exclude)? })
    }

    /// True if it leaves nothing out.
    pub fn is_all(&self) -> bool {
        self.include.is_none() && self.exclude.is_empty()
    }

    /// True if everything at and below a path is excluded.
    pub fn excludes_text(&self, text: &[u8]) -> bool {
        self.exclude.first_match(text).is_some()
    }

    /// The globs of `include`.
    pub fn include(&self) -> Option<&[Glob]> {
        self.include.as_ref().map(GlobList::globs)
    }

    /// The globs of `exclude`.
    pub fn exclude(&self) -> &[Glob] {
        self.exclude.globs()
    }

    /// True if the leaf with this text is selected.
    pub fn selects_text(&self, text: &[u8]) -> bool {
        self.include.as_ref().is_none_or(|globs| globs.first_match(text).is_some())
            && !self.excludes_text(text)
    }
}

/// Names under which stored leaves are wanted. The first rule that applies to a path renames it,
/// once.
///
/// A rule is a pair `from → to`. `from` is a glob that matches a path *or a leading part of it*
/// (whole components): what follows stays, so that `model → params` moves a whole subtree, and an
/// exact path renames one leaf. In `to`, the wildcards of `from` stand for what they matched: `*`
/// (or `**`, `?`) for the next one, `{2}` for the second. Wildcards take as little as they can.
///
/// | rules | path | new path |
/// |---|---|---|
/// | `model → params` | `model/decoder/w` | `params/decoder/w` |
/// | `optim/layer_*/** → optimizer/layers[*]/**` | `optim/layer_3/mlp/mu` | `optimizer/layers[3]/mlp/mu` |
/// | `model → params` | `modelling/w` | no rule applies |
#[derive(Clone, Debug, Default)]
pub struct Renames {
    from: GlobList,
    /// One for each glob.
    to: Vec<NewName>,
}

#[derive(Clone, Debug)]
struct NewName {
    pieces: Vec<Piece>,
    /// The right side, as it was given.
    given: Box<str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Capture(usize),
}

impl Renames {
    /// Parses rules.
    pub fn new<S: AsRef<str>>(rules: impl IntoIterator<Item = (S, S)>) -> Result<Self> {
        let mut renames = Self::default();
        for (from, to) in rules {
            let (from, to) = (Glob::new(from.as_ref())?, to.as_ref());
            let wrong = |what: String| Error::Glob { glob: format!("{} → {to}", from.as_str()), what };
            let wildcards = from.wildcards().ok_or_else(|| {
                wrong("a rename cannot have braces, since its wildcards would not be known; give one rule for each".into())
            })?;
            let pieces = template(to, &wildcards).map_err(wrong)?;
            renames.to.push(NewName { pieces, given: to.into() });
            renames.from.push(from);
        }
        Ok(renames)
    }

    /// The rules' `from`, in order.
    pub(crate) fn globs(&self) -> &[Glob] {
        self.from.globs()
    }

    /// A rule as it was given.
    pub(crate) fn rule(&self, number: usize) -> Option<(&str, &str)> {
        Some((self.globs().get(number)?.as_str(), &self.to.get(number)?.given))
    }

    /// The new name of a path, both as renderings; `None` where no rule applies.
    pub fn apply_rendered(&self, path: &str) -> Result<Option<String>> {
        let glob = Glob::new(&escape(path))?;
        Ok(glob.literal().and_then(|text| self.apply_text(text)).map(|(_, text)| render(&text)))
    }

    /// The number of the rule that applies, and the new text.
    pub(crate) fn apply_text(&self, text: &[u8]) -> Option<(usize, Vec<u8>)> {
        let number = self.from.first_match(text)?;
        let leading = self.globs()[number].match_leading(text)?;
        let mut out = Vec::with_capacity(text.len());
        for piece in &self.to[number].pieces {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Capture(n) => out.extend_from_slice(leading.captures.get(*n)?),
            }
        }
        out.extend_from_slice(leading.rest);
        Some((number, out))
    }
}

/// Parses the right side of a rename: a rendered path in which wildcards and `{n}` stand for what
/// was matched.
fn template(to: &str, wildcards: &[Wildcard]) -> Result<Vec<Piece>, String> {
    // It is read as a glob, so that both sides have one grammar; `{n}` becomes the kind of wildcard
    // that it stands for.
    let (mut glob, mut order, mut next, mut after_wildcard) = (String::new(), Vec::new(), 0, false);
    let mut chars = to.chars().peekable();
    while let Some(c) = chars.next() {
        let is_wildcard = matches!(c, '{' | '*' | '?');
        if is_wildcard && after_wildcard {
            return Err(
                "two wildcards of the right side follow each other directly. Put some text between them"
                    .into(),
            );
        }
        after_wildcard = is_wildcard;
        let wildcard = match c {
            '\\' => {
                glob.push(c);
                glob.extend(chars.next());
                continue;
            }
            '{' => {
                let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
                let n = digits.parse().ok().and_then(|n: usize| n.checked_sub(1)).ok_or(BRACES)?;
                chars.next_if_eq(&'}').ok_or(BRACES)?;
                n
            }
            '*' | '?' => {
                chars.next_if(|&next| c == '*' && next == '*');
                next += 1;
                next - 1
            }
            c => {
                glob.push(c);
                continue;
            }
        };
        glob.push_str(match wildcards.get(wildcard) {
            Some(Wildcard::Levels) => "**",
            Some(Wildcard::Part) => "*",
            None => {
                let n = wildcards.len();
                return Err(format!(
                    "its right side asks for wildcard {}, but its left side has {n}",
                    wildcard + 1
                ));
            }
        });
        order.push(wildcard);
    }
    let (parts, found) = crate::glob::template(&glob)?;
    if found.len() != order.len()
        || !found.iter().zip(&order).all(|(found, &n)| wildcards.get(n) == Some(found))
    {
        return Err("a `**` that stands for whole levels must be a whole level on both sides".into());
    }
    let mut order = order.into_iter();
    Ok(parts
        .into_iter()
        .filter_map(|part| part.map(Piece::Text).or_else(|| order.next().map(Piece::Capture)))
        .collect())
}

const BRACES: &str =
    "on the right side of a rename, `{1}` stands for the first wildcard; a literal `{` is written `\\{`";

#[cfg(test)]
mod tests;
