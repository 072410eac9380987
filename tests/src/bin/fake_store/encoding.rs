//! XML, base64, percent signs and dates: the little that requests and answers need.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Escapes a text for XML.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            char => out.push(char),
        }
    }
    out
}

fn unescaped(text: &str) -> String {
    let named = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    named.replace("&apos;", "'").replace("&#39;", "'").replace("&#34;", "\"").replace("&amp;", "&")
}

/// The raw contents of all elements with a name. They have no attributes.
pub fn elements<'a>(xml: &'a str, name: &str) -> Vec<&'a str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let pieces = xml.split(&open).skip(1);
    pieces.filter_map(|piece| piece.split_once(&close).map(|(content, _)| content)).collect()
}

/// The text of the first element with a name.
pub fn text_of(xml: &str, name: &str) -> Option<String> {
    elements(xml, name).first().map(|text| unescaped(text))
}

/// Encodes bytes in base64.
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte));
        let bits = bits << (8 * (3 - three.len()));
        for place in 0..4 {
            let digit = DIGITS.get((bits >> (18 - 6 * place) & 63) as usize).copied().unwrap_or(b'=');
            out.push(if place > three.len() { '=' } else { char::from(digit) });
        }
    }
    out
}

/// Decodes `%2F` and the like. `None` if the result is not UTF-8.
pub fn percent_decoded(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let byte = match (first, after.get(..2)) {
            (b'%', Some(digits)) => {
                rest = after.get(2..).unwrap_or_default();
                u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?
            }
            (first, _) => {
                rest = after;
                *first
            }
        };
        out.push(byte);
    }
    String::from_utf8(out).ok()
}

/// Decodes the query of a URL.
pub fn query(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded = |text: &str| percent_decoded(&text.replace('+', " "));
            Some((decoded(name)?, decoded(value)?))
        })
        .collect()
}

/// Year, month, day, the day of the week from Sunday on, and the seconds of the day.
fn civil(time: SystemTime) -> (u64, usize, u64, usize, u64, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (days, second) = (seconds / 86400, seconds % 86400);
    // The algorithm `civil_from_days` of Howard Hinnant, for days after 1970.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month as usize, day, ((days + 4) % 7) as usize, second, since.subsec_millis())
}

/// A date as headers have it: `Fri, 27 Nov 2026 14:30:00 GMT`.
pub fn http_date(time: SystemTime) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, weekday, second, _) = civil(time);
    let weekday = DAYS.get(weekday).unwrap_or(&"Sun");
    let month = MONTHS.get(month - 1).unwrap_or(&"Jan");
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
}

/// A date as listings of S3 have it: `2026-11-27T14:30:00.000Z`.
pub fn iso_date(time: SystemTime) -> String {
    let (year, month, day, _, second, milliseconds) = civil(time);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

/// Appends `<name>text</name>`.
pub fn element(out: &mut String, name: &str, text: &str) {
    let _ = write!(out, "<{name}>{}</{name}>", escaped(text));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let time = UNIX_EPOCH + Duration::from_millis(1_795_789_845_067);
        assert_eq!(http_date(time), "Fri, 27 Nov 2026 14:30:45 GMT");
        assert_eq!(iso_date(time), "2026-11-27T14:30:45.067Z");
        let leap = UNIX_EPOCH + Duration::from_secs(1_709_164_800);
        assert_eq!(http_date(leap), "Thu, 29 Feb 2024 00:00:00 GMT");
    }

    #[test]
    fn texts_are_encoded_and_decoded() {
        assert_eq!(["", "f", "fo", "foo"].map(|text| base64(text.as_bytes())), ["", "Zg==", "Zm8=", "Zm9v"]);
        assert_eq!(percent_decoded("a%2Fb%20c%").as_deref(), Some("a/b c%"));
        assert_eq!(percent_decoded("%ff"), None);
        assert_eq!(query("list-type=2&prefix=a%2F&uploads").map(|pairs| pairs.len()), Some(3));
        assert_eq!(elements("<A><B>1</B><B>2</B></A>", "B"), ["1", "2"]);
        assert_eq!(text_of("<Key>a&amp;lt;b</Key>", "Key").as_deref(), Some("a&lt;b"));
    }
}
