// Activation reader: the addresses of the vectors of a step's pixels, word by word on port 0
// (microarchitecture.md, "MAC array": RUN). All addresses are sums of strides; nothing multiplies.
module tw_mac_reader
  import tw_pkg::*;
#(
    parameter int unsigned OFFSET_BITS = $clog2(W),
    parameter int unsigned ROW_BITS = $clog2(HALF_ROWS)
) (
    input logic clk,
    input logic begin_instruction,
    /* verilator lint_off UNUSEDSIGNAL */ // each module uses some of the instruction's fields
    input mac_conv_t head,
    input mac_conv_t instruction,
    /* verilator lint_on UNUSEDSIGNAL */
    input logic run,  // the step's reads may be requested
    input logic step_end,  // last cycle of the step
    output sram_request_t request,
    input logic granted,
    // The step.
    output logic finished,  // its last read was granted, in this cycle or earlier
    output logic first_step,
    output logic last_step,
    output logic last,  // of the instruction
    // The word requested.
    output logic first_word,  // of the step
    output logic last_word,  // of its vector
    output logic [OFFSET_BITS-1:0] offset,  // of the vector's first byte in its first word
    output logic [6:0] word,  // its number within the vector
    output logic [7:0] bytes,  // of the vector, minus one
    output logic [ROW_BITS-1:0] pixel  // row of the half it is for
);
  logic last_cb, last_kx, last_pb, last_ob;
  logic [11:0] block_rows;
  tw_mac_steps steps (
      .clk,
      .begin_instruction,
      .head,
      .instruction,
      .advance(step_end),
      .first_step,
      .last_cb,
      .last_kx,
      .last_step,
      .last_pb,
      .last_ob,
      .block_rows
  );
  assign last = last_step && last_pb && last_ob;

  // Origins without the kernel's and channel block's offset: of the output-channel block, of the
  // pixel block, of the row, of the pixel. Offsets: of the kernel row, the kernel column, the step.
  logic [23:0] ob_q, block_q, row_q, pixel_q;
  logic [23:0] ky_offset_q, kx_offset_q, offset_q;
  logic [11:0] ox_q, oy_q;
  logic [ROW_BITS-1:0] index_q;
  logic [6:0] word_q;
  logic finished_q;  // while the loader still works

  /* verilator lint_off UNUSEDSIGNAL */ // an address above the SRAM's end is refused by the verifier
  logic [23:0] address;
  /* verilator lint_on UNUSEDSIGNAL */
  logic [8:0] last_byte;  // counted from the start of the first word
  assign address = pixel_q + offset_q;
  assign offset = address[OFFSET_BITS-1:0];
  assign last_byte = 9'(offset) + 9'(bytes);
  assign word = word_q;
  assign last_word = word_q == 7'(last_byte >> OFFSET_BITS);
  assign first_word = index_q == '0 && word_q == '0;
  assign pixel = index_q;
  always_comb begin
    if (instruction.diag) bytes = last_ob ? instruction.cols_last : instruction.cols;
    else bytes = last_cb ? instruction.c_last : instruction.c_rows;
  end

  always_comb begin
    request = '0;
    request.valid = run && !finished_q;
    request.address = WORD_ADDRESS_BITS'(address >> OFFSET_BITS) + WORD_ADDRESS_BITS'(word_q);
  end

  logic vector_end, row_end;
  assign vector_end = granted && last_word;
  assign row_end = ox_q == instruction.out_w;
  assign finished = finished_q || (vector_end && row_end && oy_q == block_rows);

  logic [23:0] next_row, next_kx, next_ky, next_ob;
  assign next_row = row_q + instruction.oy_stride;
  assign next_kx = kx_offset_q + 24'(instruction.kx_stride);
  assign next_ky = ky_offset_q + 24'(instruction.ky_stride);
  assign next_ob = ob_q + 24'(instruction.ob_stride);

  always_ff @(posedge clk) begin
    if (begin_instruction) begin
      ob_q <= head.act;
      block_q <= head.act;
      row_q <= head.act;
      pixel_q <= head.act;
      ky_offset_q <= '0;
      kx_offset_q <= '0;
      offset_q <= '0;
      ox_q <= '0;
      oy_q <= '0;
      index_q <= '0;
      word_q <= '0;
      finished_q <= 1'b0;
    end else if (step_end) begin
      ox_q <= '0;
      oy_q <= '0;
      index_q <= '0;
      word_q <= '0;
      finished_q <= 1'b0;
      if (last_step) begin
        ky_offset_q <= '0;
        kx_offset_q <= '0;
        offset_q <= '0;
      end else if (last_cb && last_kx) begin
        ky_offset_q <= next_ky;
        kx_offset_q <= next_ky;
        offset_q <= next_ky;
      end else if (last_cb) begin
        kx_offset_q <= next_kx;
        offset_q <= next_kx;
      end else begin
        offset_q <= offset_q + 24'(instruction.cb_stride);
      end
      if (!last_step) begin
        row_q <= block_q;
        pixel_q <= block_q;
      end else if (!last_pb) begin
        // The row behind the block's last one is the next block's first.
        block_q <= next_row;
        row_q <= next_row;
        pixel_q <= next_row;
      end else begin
        ob_q <= next_ob;
        block_q <= next_ob;
        row_q <= next_ob;
        pixel_q <= next_ob;
      end
    end else if (granted) begin
      if (finished) begin
        finished_q <= 1'b1;
      end else if (!last_word) begin
        word_q <= word_q + 7'd1;
      end else begin
        word_q <= '0;
        index_q <= index_q + ROW_BITS'(1);
        if (row_end) begin
          ox_q <= '0;
          oy_q <= oy_q + 12'd1;
          row_q <= next_row;
          pixel_q <= next_row;
        end else begin
          ox_q <= ox_q + 12'd1;
          pixel_q <= pixel_q + 24'(instruction.ox_stride);
        end
      end
    end
  end
endmodule
