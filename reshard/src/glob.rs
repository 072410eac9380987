//! Globs over leaf paths: one dialect for selections, renames and every option that is given per
//! glob.
//!
//! A glob is a rendered leaf path in which parts are left open. It is matched against components,
//! not against text, so that a key that holds `/` is one level and a list index is never half
//! matched:
//!
//! | in a glob | matches |
//! |---|---|
//! | `params/w`, `layers[0]/w` | itself: keys and indices as they render, `\` escapes as they render (`\/`, `\[`, `\]`, `\\`, `\e`) |
//! | `*` | any run of characters (or none) up to the next `/`; the indices of a list belong to the name before them, so `layers*/w` matches `layers[0]/w` |
//! | `?` | one character of a key |
//! | `[*]`, `[1?]` | one index, any or of that form: `layers[*]/w`. Brackets are indices here, never character classes |
//! | `**` as a whole level | any number of levels, indices too: `**/w` matches `w`, `a/w`, `a[0]/b/w`; `a/**` everything below `a`, not `a` itself; `**` everything |
//! | `**` inside a level | any run of characters across levels: `**.weight`, `**norm*` |
//! | `{a,b}` | either; may be nested, may hold `/` and wildcards |
//! | `\*` `\?` `\{` `\}` `\,` | that character |
//!
//! A list of globs ([`GlobList`]) selects subtrees: a glob applies to what it matches and to
//! everything below that, so that `params` stands for `params` and `params/**`.
//!
//! For paths without brackets and escapes, these globs match what globset matches (a property test
//! compares them). globset has no indices, no keys with `/`, and no captures, which renames need.
//!
//! [`escape`] makes of a rendered path the glob that matches it alone.

use std::collections::HashMap;
use std::fmt::Write as _;

use stepwell_core::leaf_path::{Component, LeafPath};

use crate::{Error, Result};

/// Stands before a key or field in a [`PathText`]. Neither mark occurs in UTF-8.
const KEY: u8 = 0xFF;
/// Stands before an index or integer key.
const INDEX: u8 = 0xFE;
/// Alternatives that the braces of one glob may stand for.
const MAX_ALTERNATIVES: usize = 1024;

/// A leaf path in the form that globs are matched against: every component's text behind a mark
/// that says how it renders. Two paths have the same text if and only if they render alike (a key
/// and a field of one name do; so do an index and an integer key).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathText(Vec<u8>);

impl PathText {
    /// The text of a path.
    pub fn new(path: &LeafPath) -> Self {
        let mut text = Vec::new();
        path.0.iter().for_each(|component| push_component(component, &mut text));
        Self(text)
    }

    /// Its bytes; [`render`] makes them readable.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Appends a component's text.
pub(crate) fn push_component(component: &Component, text: &mut Vec<u8>) {
    match component {
        Component::Key(name) | Component::Field(name) => {
            text.push(KEY);
            text.extend_from_slice(name.as_bytes());
        }
        Component::Int(key) => {
            text.push(INDEX);
            text.extend_from_slice(key.to_string().as_bytes());
        }
        Component::Index(index) => {
            text.push(INDEX);
            text.extend_from_slice(index.to_string().as_bytes());
        }
    }
}

/// The components of a text, each with its mark.
pub(crate) fn components(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = 1 + rest.get(1..)?.iter().position(|&b| is_mark(b)).unwrap_or(rest.len() - 1);
        let (component, after) = rest.split_at(end);
        rest = after;
        Some(component)
    })
}

/// The ends of the leading parts of a text that are whole components, from none of it (0) to all of
/// it.
pub(crate) fn boundaries(text: &[u8]) -> impl Iterator<Item = usize> {
    (0..=text.len()).filter(move |&at| is_boundary(text, at))
}

fn is_mark(byte: u8) -> bool {
    byte >= INDEX
}

fn is_boundary(text: &[u8], at: usize) -> bool {
    text.get(at).is_none_or(|&byte| is_mark(byte))
}

/// True if a text is that of `branch`, or of something below it.
pub(crate) fn is_within(text: &[u8], branch: &[u8]) -> bool {
    text.starts_with(branch) && is_boundary(text, branch.len())
}

/// How a text renders: as its path does.
pub fn render(text: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for component in components(text) {
        let body = String::from_utf8_lossy(&component[1..]);
        if component[0] == INDEX {
            let _ = write!(out, "[{body}]");
        } else {
            Component::Key(body.into()).render(&mut out);
        }
    }
    out
}

/// The glob that matches the path with this rendering, and no other: the wildcards' characters get
/// their `\`; what the rendering has escaped already stays as it is.
pub fn escape(rendered: &str) -> String {
    let mut out = String::with_capacity(rendered.len());
    for c in rendered.chars() {
        if matches!(c, '*' | '?' | '{' | '}') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// These bytes, marks included.
    Literal(Vec<u8>),
    /// `?`
    One,
    /// `*`; inside brackets it ends at the index.
    Run { inside_index: bool },
    /// `**` inside a level.
    Any,
    /// `**` as a level: whole components, at least that many.
    Levels { min: usize },
    /// Matches nothing, before a component.
    Boundary,
}

/// A glob; see the module documentation.
#[derive(Clone, Debug)]
pub struct Glob {
    glob: String,
    alternatives: Vec<Vec<Token>>,
}

impl Glob {
    /// Parses a glob.
    pub fn new(glob: &str) -> Result<Self> {
        let wrong = |what: String| Error::Glob { glob: glob.to_owned(), what };
        let mut texts = Vec::new();
        expand_braces(glob, &mut texts).map_err(wrong)?;
        let alternatives = texts.iter().map(|text| parse(text)).collect::<Result<_, _>>().map_err(wrong)?;
        Ok(Self { glob: glob.to_owned(), alternatives })
    }

    /// The glob, as it was given.
    pub fn as_str(&self) -> &str {
        &self.glob
    }

    /// True if it matches a whole path.
    pub fn is_match(&self, text: &PathText) -> bool {
        self.matches(text.as_bytes())
    }

    /// True if it matches a path or a leading part of it (whole components).
    pub fn selects(&self, text: &[u8]) -> bool {
        self.alternatives.iter().any(|tokens| Matcher::new(tokens, text).run(true).is_some())
    }

    fn matches(&self, text: &[u8]) -> bool {
        self.alternatives.iter().any(|tokens| Matcher::new(tokens, text).run(false).is_some())
    }

    /// The text that it stands for, where it has no wildcards.
    pub(crate) fn literal(&self) -> Option<&[u8]> {
        match self.alternatives.as_slice() {
            [tokens] => match tokens.as_slice() {
                [] => Some(&[]),
                [Token::Literal(text)] => Some(text),
                _ => None,
            },
            _ => None,
        }
    }

    /// The common beginning of every matching path; with alternatives, the first one's.
    pub(crate) fn leading_literal(&self) -> &[u8] {
        match self.alternatives.first().and_then(|tokens| tokens.first()) {
            Some(Token::Literal(text)) => text,
            _ => &[],
        }
    }

    /// The common end of every matching path, likewise.
    pub(crate) fn trailing_literal(&self) -> Option<&[u8]> {
        match self.alternatives.first().and_then(|tokens| tokens.last()) {
            Some(Token::Literal(text)) => Some(text),
            _ => None,
        }
    }

    /// Matches a path or a leading part of it (whole components). Wildcards take as little as they
    /// can.
    pub(crate) fn match_leading<'t>(&self, text: &'t [u8]) -> Option<Leading<'t>> {
        self.alternatives.iter().find_map(|tokens| {
            let mut matcher = Matcher::new(tokens, text);
            let end = matcher.run(true)?;
            let captures = matcher.captures.iter().map(|&(from, to)| &text[from..to]).collect();
            Some(Leading { captures, rest: &text[end..] })
        })
    }

    /// Its wildcards, or `None` where braces make them differ.
    pub(crate) fn wildcards(&self) -> Option<Vec<Wildcard>> {
        let [tokens] = self.alternatives.as_slice() else { return None };
        Some(wildcards(tokens))
    }
}

/// The kind of a wildcard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wildcard {
    /// Whole components, or what begins with one.
    Levels,
    /// A part of a component, at least at its beginning.
    Part,
}

fn wildcards(tokens: &[Token]) -> Vec<Wildcard> {
    let mut after_boundary = false;
    let mut found = Vec::new();
    for token in tokens {
        match token {
            Token::Levels { .. } => found.push(Wildcard::Levels),
            Token::Any if after_boundary => found.push(Wildcard::Levels),
            token if token.is_wildcard() => found.push(Wildcard::Part),
            _ => {}
        }
        after_boundary = *token == Token::Boundary;
    }
    found
}

/// The parts of a brace-free glob: literal texts, and `None` for each wildcard.
pub(crate) type Parts = Vec<Option<Vec<u8>>>;

/// A brace-free glob in its parts, with what its wildcards stand for.
pub(crate) fn template(glob: &str) -> Result<(Parts, Vec<Wildcard>), String> {
    let tokens = parse(glob)?;
    let wildcards = wildcards(&tokens);
    let parts = tokens.into_iter().filter(|token| *token != Token::Boundary).map(|token| match token {
        Token::Literal(text) => Some(text),
        _ => None,
    });
    Ok((parts.collect(), wildcards))
}

/// The result of [`Glob::match_leading`].
pub(crate) struct Leading<'t> {
    /// The text that each wildcard matched, in order.
    pub(crate) captures: Vec<&'t [u8]>,
    /// The text after the match.
    pub(crate) rest: &'t [u8],
}

impl Token {
    fn is_wildcard(&self) -> bool {
        !matches!(self, Self::Literal(_) | Self::Boundary)
    }
}

/// The texts that a glob's braces stand for.
fn expand_braces(glob: &str, out: &mut Vec<String>) -> Result<(), String> {
    let (mut open, mut depth, mut commas) = (None, 0_usize, Vec::new());
    let mut chars = glob.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '{' => {
                depth += 1;
                open.get_or_insert(at);
            }
            ',' if depth == 1 => commas.push(at),
            '}' => {
                depth = depth.checked_sub(1).ok_or("`}` without `{`; a literal one is written `\\}`")?;
                let Some(start) = open.filter(|_| depth == 0) else { continue };
                let mut from = start + 1;
                for to in commas.into_iter().chain([at]) {
                    let text = [&glob[..start], &glob[from..to], &glob[at + 1..]].concat();
                    expand_braces(&text, out)?;
                    from = to + 1;
                }
                return Ok(());
            }
            _ => {}
        }
    }
    if depth > 0 {
        return Err("`{` without `}`; a literal one is written `\\{`".into());
    }
    if out.len() == MAX_ALTERNATIVES {
        return Err(format!("its braces stand for more than {MAX_ALTERNATIVES} globs; use `*`"));
    }
    out.push(glob.to_owned());
    Ok(())
}

/// Parses a glob without braces.
fn parse(glob: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut chars = glob.chars().peekable();
    let mut level = Level::Start; // what the current level holds so far
    let mut first = true;
    while let Some(c) = chars.next() {
        let starts = level == Level::Start;
        if starts && !matches!(c, '/' | '[' | '*') {
            literal(&mut tokens, KEY);
        }
        if level == Level::AfterIndex && !matches!(c, '/' | '[' | '*') {
            return Err("after `]` comes `/`, another `[`, `*`, or the end".into());
        }
        match c {
            '/' if starts && !first => return Err(EMPTY_LEVEL.into()),
            '/' if starts => return Err("a path has no leading `/`; an empty key is written `\\e`".into()),
            '/' => {
                if chars.peek().is_none() {
                    return Err(EMPTY_LEVEL.into());
                }
                level = Level::Start;
                first = false;
                continue;
            }
            '[' => {
                index(&mut chars, &mut tokens)?;
                level = Level::AfterIndex;
                continue;
            }
            ']' => return Err("`]` without `[`; in a key it is written `\\]`".into()),
            '*' if chars.next_if_eq(&'*').is_some() => {
                while chars.next_if_eq(&'*').is_some() {}
                if starts && chars.peek().is_none_or(|&c| c == '/') {
                    let min = usize::from(chars.peek().is_none() && !first);
                    if !matches!(tokens.last(), Some(Token::Levels { .. })) {
                        tokens.push(Token::Levels { min });
                    } else if let Some(last) = tokens.last_mut() {
                        *last = Token::Levels { min };
                    }
                } else {
                    if starts {
                        tokens.push(Token::Boundary);
                    }
                    tokens.push(Token::Any);
                }
            }
            '*' => {
                if starts {
                    literal(&mut tokens, KEY);
                }
                tokens.push(Token::Run { inside_index: false });
            }
            '?' => tokens.push(Token::One),
            '\\' => match chars.next() {
                Some('e') => {}
                Some(c) if matches!(c, '\\' | '/' | '[' | ']' | '*' | '?' | '{' | '}' | ',') => {
                    literal_char(&mut tokens, c);
                }
                Some(c) => return Err(format!("`\\{c}` means nothing; a `\\` in a key is written `\\\\`")),
                None => return Err("it ends in a lone `\\`; a `\\` in a key is written `\\\\`".into()),
            },
            c => literal_char(&mut tokens, c),
        }
        level = Level::Name;
    }
    Ok(tokens)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Start,
    Name,
    AfterIndex,
}

const EMPTY_LEVEL: &str = "it has an empty level; an empty key is written `\\e`";

/// Parses the content of brackets.
fn index(chars: &mut impl Iterator<Item = char>, tokens: &mut Vec<Token>) -> Result<(), String> {
    literal(tokens, INDEX);
    let mut empty = true;
    for c in chars {
        match c {
            ']' if empty => return Err("`[]` names no index; `[*]` matches any".into()),
            ']' => return Ok(()),
            '*' => {
                if tokens.last() != Some(&(Token::Run { inside_index: true })) {
                    tokens.push(Token::Run { inside_index: true });
                }
            }
            '?' => tokens.push(Token::One),
            '0'..='9' | '-' => literal_char(tokens, c),
            c => {
                return Err(format!(
                    "`{c}` stands in brackets, which hold an index (`[3]`, `[*]`) and are no character class; in a key, brackets are written `\\[` and `\\]`"
                ));
            }
        }
        empty = false;
    }
    Err("`[` without `]`; in a key it is written `\\[`".into())
}

fn literal(tokens: &mut Vec<Token>, byte: u8) {
    if let Some(Token::Literal(text)) = tokens.last_mut() {
        text.push(byte);
    } else {
        tokens.push(Token::Literal(vec![byte]));
    }
}

fn literal_char(tokens: &mut Vec<Token>, c: char) {
    c.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| literal(tokens, byte));
}

/// Backtracks. With many wildcards it remembers failures, so that it takes at most tokens × bytes
/// steps.
struct Matcher<'g, 't> {
    tokens: &'g [Token],
    text: &'t [u8],
    leading: bool,
    captures: Vec<(usize, usize)>,
    /// By token and place: true once that was tried in vain. Empty for few wildcards.
    failed: Vec<Vec<bool>>,
}

impl<'g, 't> Matcher<'g, 't> {
    fn new(tokens: &'g [Token], text: &'t [u8]) -> Self {
        Self { tokens, text, leading: false, captures: Vec::new(), failed: Vec::new() }
    }

    /// Returns the end of the match.
    fn run(&mut self, leading: bool) -> Option<usize> {
        self.leading = leading;
        if !leading
            && let Some(Token::Literal(end)) = self.tokens.last()
            && !self.text.ends_with(end)
        {
            return None;
        }
        if self.tokens.iter().filter(|token| token.is_wildcard()).nth(2).is_some() {
            self.failed = vec![vec![false; self.text.len()]; self.tokens.len()];
        }
        self.step(0, 0)
    }

    fn step(&mut self, token: usize, at: usize) -> Option<usize> {
        if self.failed.get(token).and_then(|failed| failed.get(at)) == Some(&true) {
            return None;
        }
        let found = self.try_step(token, at);
        if found.is_none()
            && let Some(failed) = self.failed.get_mut(token).and_then(|failed| failed.get_mut(at))
        {
            *failed = true;
        }
        found
    }

    fn try_step(&mut self, token: usize, at: usize) -> Option<usize> {
        let rest = &self.text[at..];
        match self.tokens.get(token) {
            None => (rest.is_empty() || (self.leading && is_boundary(self.text, at))).then_some(at),
            Some(Token::Literal(literal)) => {
                rest.starts_with(literal).then_some(())?;
                self.step(token + 1, at + literal.len())
            }
            Some(Token::Boundary) => rest
                .first()
                .is_some_and(|&b| is_mark(b))
                .then_some(())
                .and_then(|()| self.step(token + 1, at)),
            Some(Token::One) => {
                let first = *rest.first().filter(|&&b| !is_mark(b))?;
                let width = match first {
                    0..=0x7F => 1,
                    0x80..=0xDF => 2,
                    0xE0..=0xEF => 3,
                    _ => 4,
                };
                self.capture(token, at, (at + width).min(self.text.len()))
            }
            Some(&Token::Run { inside_index }) => {
                let stop = |&b: &u8| b == KEY || (inside_index && b == INDEX);
                let longest = rest.iter().position(stop).unwrap_or(rest.len());
                (at..=at + longest).find_map(|to| self.capture(token, at, to))
            }
            Some(Token::Any) => (at..=self.text.len()).find_map(|to| self.capture(token, at, to)),
            Some(&Token::Levels { min }) => {
                is_boundary(self.text, at).then_some(())?;
                let from = at + min; // past the mark, so that the next boundary ends a component
                (from..=self.text.len()).find_map(|to| {
                    if is_boundary(self.text, to) { self.capture(token, at, to) } else { None }
                })
            }
        }
    }

    fn capture(&mut self, token: usize, from: usize, to: usize) -> Option<usize> {
        let depth = self.captures.len();
        self.captures.push((from, to));
        let found = self.step(token + 1, to);
        if found.is_none() {
            self.captures.truncate(depth);
        }
        found
    }
}

/// Globs in order, for "the first one that matches".
#[derive(Clone, Debug, Default)]
pub struct GlobList {
    globs: Vec<Glob>,
    /// Globs without wildcards: thousands of them cost one look-up.
    literals: HashMap<Vec<u8>, usize>,
    patterns: Vec<usize>,
}

impl GlobList {
    /// Parses globs.
    pub fn new<S: AsRef<str>>(globs: impl IntoIterator<Item = S>) -> Result<Self> {
        let mut list = Self::default();
        for glob in globs {
            list.push(Glob::new(glob.as_ref())?);
        }
        Ok(list)
    }

    /// Appends a glob.
    pub fn push(&mut self, glob: Glob) {
        let number = self.globs.len();
        if let Some(literal) = glob.literal() {
            self.literals.entry(literal.to_owned()).or_insert(number);
        } else {
            self.patterns.push(number);
        }
        self.globs.push(glob);
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.globs.is_empty()
    }

    /// The globs.
    pub fn globs(&self) -> &[Glob] {
        &self.globs
    }

    /// True if a glob selects the path with this rendering.
    pub fn selects(&self, rendered: &str) -> Result<bool> {
        Ok(self.first_match_rendered(rendered)?.is_some())
    }

    /// Number of the first glob that matches a path or a leading part of it.
    pub fn first_match(&self, text: &[u8]) -> Option<usize> {
        let literal = if self.literals.is_empty() {
            None
        } else {
            boundaries(text).filter_map(|end| self.literals.get(&text[..end]).copied()).min()
        };
        let pattern = self.patterns.iter().copied().find(|&number| self.globs[number].selects(text));
        literal.into_iter().chain(pattern).min()
    }

    /// The same for a rendered path.
    pub fn first_match_rendered(&self, path: &str) -> Result<Option<usize>> {
        let path = Glob::new(&escape(path))?;
        Ok(path.literal().and_then(|text| self.first_match(text)))
    }
}

#[cfg(test)]
mod tests;
